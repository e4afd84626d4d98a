# Two commands set everything up on a fresh Debian 12 with Node 20, as root or with sudo:
#   make demo    captures a small VM that keeps writing, restores it, compares every page
#   make test    runs the whole test suite
# What is there already is not fetched again, so that a second run needs no network.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

STAMPS := node_modules/.varve
NODE_MAJOR_MIN := 20
# What compiling better-sqlite3 and our addon needs, and the two compression libraries.
PACKAGES := build-essential python3 liblz4-dev libzstd-dev
# What fuzzing needs on top: see `make fuzz`.
FUZZ_PACKAGES := clang-14 libclang-rt-14-dev libssl-dev

NATIVE_SOURCES := $(shell find native -name '*.cpp' -o -name '*.hpp' 2>/dev/null) \
  $(wildcard native/guest/*) binding.gyp
TS_SOURCES := $(shell find src migrations -name '*.ts' 2>/dev/null) tsconfig.json tsconfig.build.json

.PHONY: help
help:
	@sed -n 's/^# \{0,1\}//; 1,4p' Makefile
	@echo 'Also: make build, make check, make lint, make bench, make native-test, make test-vmm, make clean'

.PHONY: system
system:
	@tools/system-packages $(PACKAGES)
	@tools/check-node $(NODE_MAJOR_MIN)

$(STAMPS)/install: package.json package-lock.json | system
	npm ci --no-audit --no-fund
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/native: $(STAMPS)/install $(NATIVE_SOURCES)
	npm run --silent native:build
	@touch $@

$(STAMPS)/ts: $(STAMPS)/install $(TS_SOURCES)
	npm run --silent build:ts
	@touch $@

.PHONY: build
build: $(STAMPS)/native $(STAMPS)/ts

.PHONY: demo
demo: build
	@bin/varve demo

.PHONY: test
test: build
	@tools/run-tests

# The same captures with a real Firecracker: make test-vmm FIRECRACKER=<path to the binary>
.PHONY: test-vmm
test-vmm: build
	@test -x '$(FIRECRACKER)' || { echo 'make test-vmm FIRECRACKER=<path to the binary>'; exit 2; }
	@VARVE_FIRECRACKER='$(abspath $(FIRECRACKER))' tools/run-tests test/selftest

.PHONY: check
check: build
	npm run --silent format:check
	npm run --silent lint
	npm run --silent typecheck

.PHONY: lint
lint: build
	npm run --silent lint

.PHONY: bench
bench: build
	npm run --silent bench

.PHONY: native-test
native-test: $(STAMPS)/install
	npm run --silent native:test

# A minute of fuzzing every parser. Without clang, and where it cannot be installed, it says so.
.PHONY: fuzz
fuzz: build
	@tools/system-packages $(FUZZ_PACKAGES) || echo 'clang could not be installed'
	npm run --silent test:fuzz

.PHONY: clean
clean:
	rm -rf build dist $(STAMPS) .varve
