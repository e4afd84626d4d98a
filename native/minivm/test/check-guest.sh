#!/bin/sh
# Compares the bytes of guest_program.cpp with what `as` makes of guest.S. Needs binutils.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
as --32 -o "$work/guest.o" "$here/guest.S"
objcopy -O binary -j .text "$work/guest.o" "$work/guest.bin"
od -An -v -tx1 "$work/guest.bin" | tr -d ' \n' > "$work/assembled"
sed 's,//.*,,' "$here/../guest_program.cpp" | grep -o '0x[0-9a-f][0-9a-f]' | cut -c3- |
  tr -d '\n' > "$work/committed"
cmp "$work/assembled" "$work/committed" && echo "guest_program.cpp is what guest.S says"
