#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "check.hpp"
#include "core/guest_read.hpp"
#include "core/unique_fd.hpp"
#include "fake_syscalls.hpp"

namespace varve::test {
namespace {

constexpr std::byte kUntouched{0xee};

// What a page holds: its own number, all over.
void Stamp(std::span<std::byte> memory) {
  for (std::size_t i = 0; i < memory.size(); i += 8) {
    const std::uint64_t word = i / kPageBytes * 0x9e3779b97f4a7c15 + 1;
    std::memcpy(memory.data() + i, &word, 8);
  }
}

struct Reading {
  std::vector<Row> rows;
  std::vector<std::byte> dest;
  ReadRequest request{};

  explicit Reading(std::vector<Row> of) : rows(std::move(of)), dest(RowBytes(rows), kUntouched) {
    request.rows = rows;
    request.dest = dest;
    request.stalled_ns_max = 50'000'000;
  }

  ReadOutcome Once(pid_t pid, const Syscalls& sys = RealSyscalls()) {
    return ReadGuestRows(pid, request, Slice(sys, nullptr), sys);
  }

  // To the end, slice after slice, as a worker does it.
  ReadOutcome All(pid_t pid, const Syscalls& sys = RealSyscalls()) {
    std::uint64_t syscalls = 0;
    for (;;) {
      ReadOutcome out = Once(pid, sys);
      syscalls += out.syscalls;
      out.syscalls = syscalls;
      if (out.done || out.cancelled || out.error != 0) return out;
      request.from = out.bytes_done;
      request.stalled_ns = out.stalled_ns;
    }
  }

  bool Holds(std::size_t at, const std::byte* expected, std::size_t length) const {
    return std::memcmp(dest.data() + at, expected, length) == 0;
  }
  bool Untouched(std::size_t from) const {
    for (std::size_t i = from; i < dest.size(); ++i) {
      if (dest[i] != kUntouched) return false;
    }
    return true;
  }
};

void ManySinglePages() {
  Mapping memory(4200 * kPageBytes);
  Stamp(memory.span());
  Child child([] {});
  for (const std::size_t count : {1u, 1023u, 1024u, 1025u, 2048u, 2100u}) {
    std::vector<Row> rows;
    for (std::size_t i = 0; i < count; ++i) {
      rows.push_back({memory.address() + i * 2 * kPageBytes, i * 2 * kPageBytes, kPageBytes});
    }
    Reading reading(rows);
    const auto out = reading.All(child.pid());
    CHECK(out.done && out.error == 0);
    CHECK_EQ(out.bytes_done, count * kPageBytes);
    // 1024 iovecs a call, and never more bytes than call_bytes_max.
    CHECK_EQ(out.syscalls, (count + 1023) / 1024);
    for (std::size_t i = 0; i < count; ++i) {
      CHECK(reading.Holds(i * kPageBytes, memory.data() + i * 2 * kPageBytes, kPageBytes));
    }
  }
}

// A hole of the child's at page 7 of 16, made by `make_hole`, is reported exactly, whichever row
// and offset the read comes from.
template <typename MakeHole>
void HoleAtPage7(MakeHole make_hole) {
  Mapping memory(16 * kPageBytes);
  Stamp(memory.span());
  Child child([&] { make_hole(memory.data() + 7 * kPageBytes); });
  const std::uint64_t hole = memory.address() + 7 * kPageBytes;
  const auto expect = [&](std::vector<Row> rows, std::uint64_t good_bytes) {
    Reading reading(std::move(rows));
    const auto out = reading.All(child.pid());
    CHECK_EQ(out.error, EFAULT);
    CHECK_EQ(out.address, hole);
    CHECK_EQ(out.bytes_done, good_bytes);
    CHECK(!out.done);
    CHECK(reading.Holds(0, memory.data() + (reading.rows[0].host_address - memory.address()),
                        std::min<std::uint64_t>(good_bytes, reading.rows[0].length)));
    CHECK(reading.Untouched(good_bytes));
  };
  expect({{memory.address(), 0, memory.size()}}, 7 * kPageBytes);
  expect({{memory.address(), 0, 7 * kPageBytes}, {hole, 0, kPageBytes}}, 7 * kPageBytes);
  expect({{hole, 0, kPageBytes}}, 0);
  expect({{hole + 100, 0, 200}}, 0);
  expect({{hole - 50, 0, 100}, {memory.address(), 0, 8}}, 50);
  expect({{memory.address() + 9 * kPageBytes, 0, 2 * kPageBytes}, {hole - 8, 0, 16}},
         2 * kPageBytes + 8);
}

void UnmappedHole() {
  HoleAtPage7([](std::byte* page) { ::munmap(page, kPageBytes); });
}

void ProtectedHole() {
  HoleAtPage7([](std::byte* page) { ::mprotect(page, kPageBytes, PROT_NONE); });
}

// Maps `file_bytes` of a memory file over and over, so that gibibytes of address take megabytes.
Mapping* Repeated(std::uint64_t bytes, std::uint64_t file_bytes) {
  const UniqueFd fd(::memfd_create("varve-test", MFD_CLOEXEC));
  CHECK(fd && ::ftruncate(fd.get(), static_cast<off_t>(file_bytes)) == 0);
  auto* whole = new Mapping(bytes);
  for (std::uint64_t at = 0; at < bytes; at += file_bytes) {
    void* part = ::mmap(whole->data() + at, std::min(file_bytes, bytes - at),
                        PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd.get(), 0);
    CHECK(part == whole->data() + at);
  }
  return whole;
}

// The kernel moves at most 2147479552 bytes a call; what is beyond must follow all the same.
void BeyondTwoGibibytes() {
  constexpr std::uint64_t kBytes = (std::uint64_t{2} << 30) + (1u << 20);
  constexpr std::uint64_t kSourcePeriod = 24u << 20;
  constexpr std::uint64_t kDestPeriod = 16u << 20;
  std::unique_ptr<Mapping> source(Repeated(kBytes, kSourcePeriod));
  Stamp(source->span().first(kSourcePeriod));
  Child child([] {});
  std::unique_ptr<Mapping> dest(Repeated(kBytes, kDestPeriod));
  const std::array rows{Row{source->address(), 0, kBytes}};
  ReadRequest request{};
  request.rows = rows;
  request.dest = dest->span();
  for (const std::uint64_t call_bytes_max : {~std::uint64_t{0}, std::uint64_t{8} << 20}) {
    request.call_bytes_max = call_bytes_max;
    const Slice slice(RealSyscalls(), nullptr, ~std::uint64_t{0} >> 1);
    const auto out = ReadGuestRows(child.pid(), request, slice);
    CHECK(out.done && out.error == 0);
    CHECK_EQ(out.bytes_done, kBytes);
    CHECK_EQ(out.syscalls, call_bytes_max == 8u << 20 ? 257u : 2u);
    // The last bytes read, which no later ones have covered.
    const std::uint64_t last = kBytes - kDestPeriod;
    CHECK(std::memcmp(dest->data() + last, source->data() + last, kDestPeriod) == 0);
  }
}

void ShortReadsGoOn() {
  Random random(Seed() + 4);
  Mapping memory(64 * kPageBytes);
  for (auto& byte : memory.span()) byte = static_cast<std::byte>(random.Next());
  for (int round = 0; round < 300; ++round) {
    std::vector<Row> rows;
    std::vector<std::byte> expected;
    for (std::uint64_t i = random.Below(3000); i > 0; --i) {
      const std::uint64_t length = random.Below(10) == 0 ? 0 : 1 + random.Below(300);
      const std::uint64_t at = random.Below(memory.size() - length);
      rows.push_back({memory.address() + at, at, length});
      expected.insert(expected.end(), memory.data() + at, memory.data() + at + length);
    }
    script = Script{};
    script.shorten = &random;
    script.call_cost_ns = random.Below(2) * (kSliceNs / 3 + 1);
    for (std::uint64_t i = random.Below(6); i > 0; --i) {
      script.errors.push_back(std::array{0, EINTR, EAGAIN, ENOMEM}[random.Below(4)]);
    }
    Reading reading(rows);
    reading.request.call_bytes_max = 1 + random.Below(20000);
    const auto out = reading.All(1, kFake);
    CHECK(out.done && out.error == 0);
    CHECK_EQ(out.bytes_done, expected.size());
    CHECK(reading.dest == expected);
    CHECK(script.bytes_max <= reading.request.call_bytes_max);
  }
}

void InterruptedCallsAreRepeated() {
  Mapping memory(kPageBytes);
  script = Script{};
  script.errors = {EINTR, EINTR, EINTR, EAGAIN, 0};
  Reading reading({{memory.address(), 0, kPageBytes}});
  const auto out = reading.Once(1, kFake);
  CHECK(out.done && out.error == 0);
  CHECK_EQ(out.syscalls, 5u);
  CHECK_EQ(script.slept_ns, 0u);
}

void EnomemEndsAtItsDeadline() {
  Mapping memory(kPageBytes);
  script = Script{};
  script.error_always = ENOMEM;
  Reading reading({{memory.address(), 0, kPageBytes}});
  auto out = reading.Once(1, kFake);
  CHECK(!out.done && out.error == 0 && out.stalled_ns > 0);  // the slice ends before the deadline
  CHECK(script.now_ns < 2 * kSliceNs);
  out = reading.All(1, kFake);
  CHECK_EQ(out.error, ENOMEM);
  CHECK(script.slept_ns >= 50'000'000 && script.slept_ns < 70'000'000);

  script = Script{};
  script.errors = {ENOMEM, ENOMEM, 0};
  Reading passing({{memory.address(), 0, kPageBytes}});
  out = passing.All(1, kFake);
  CHECK(out.done && out.error == 0 && out.stalled_ns == 0);

  script = Script{};
  script.error_always = ENOMEM;
  passing.request.from = 0;
  passing.request.stalled_ns_max = 0;
  CHECK_EQ(passing.Once(1, kFake).error, ENOMEM);
  CHECK_EQ(script.calls, 1u);
}

void ACancelledReadMakesNoFurtherCall() {
  Mapping memory(8 * kPageBytes);
  std::int32_t word = 0;
  script = Script{};
  script.set_on_call = &word;
  script.set_call = 2;
  Reading reading({{memory.address(), 0, memory.size()}});
  reading.request.call_bytes_max = kPageBytes;
  const auto out = ReadGuestRows(1, reading.request, Slice(kFake, &word), kFake);
  CHECK(out.cancelled && !out.done && out.error == 0);
  CHECK_EQ(script.calls, 2u);
  CHECK_EQ(out.bytes_done, 2 * kPageBytes);
}

void AnEmptyReadIsDone() {
  // One that should not be empty is an error: it would be asked for ever.
  script = Script{};
  script.move_nothing = true;
  const auto nothing = Reading({{4096, 0, 4096}}).Once(1, kFake);
  CHECK(nothing.error == EIO && nothing.syscalls == 1 && !nothing.done);
  CHECK(Reading({}).Once(1).done);
  CHECK(Reading({{4096, 0, 0}}).Once(1).done);
  CHECK_EQ(RowBytes(std::array{Row{0, 0, ~std::uint64_t{0}}, Row{0, 0, 1}}), ~std::uint64_t{0});
}

void TheDeadAreEsrch() {
  Mapping memory(2 * kPageBytes);
  Child child([] {});
  Reading reading({{memory.address(), 0, memory.size()}});
  reading.request.call_bytes_max = kPageBytes;
  // Half of it, then the process dies.
  const auto half = ReadGuestRows(child.pid(), reading.request, Slice(RealSyscalls(), nullptr, 0));
  CHECK_EQ(half.bytes_done, kPageBytes);
  reading.request.from = half.bytes_done;
  child.Kill();
  auto out = reading.Once(child.pid());  // a zombie
  CHECK_EQ(out.error, ESRCH);
  CHECK_EQ(out.bytes_done, kPageBytes);
  const pid_t pid = child.pid();
  child.Reap();
  out = reading.Once(pid);
  CHECK_EQ(out.error, ESRCH);
}

// The kernel itself, told to refuse process_vm_readv from here on.
void RefuseReadv(int error) {
  std::array filter{
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
      sock_filter BPF_STMT(BPF_RET | BPF_K,
                           SECCOMP_RET_ERRNO | (static_cast<unsigned>(error) & SECCOMP_RET_DATA)),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  CHECK_EQ(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  CHECK_EQ(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

void ARefusingKernelIsReported() {
  Mapping memory(kPageBytes);
  Child child([] {});
  for (const int error : {ENOSYS, EPERM}) {
    InChild([&] {
      RefuseReadv(error);
      const auto out = Reading({{memory.address(), 0, kPageBytes}}).Once(child.pid());
      CHECK_EQ(out.error, error);
      CHECK_EQ(out.syscalls, 1u);
      CHECK_EQ(out.address, 0u);
    });
  }
}

void AnotherUsersProcessIsEperm() {
  if (::getuid() != 0) return;
  Mapping memory(kPageBytes);
  Child child([] {});
  InChild([&] {
    CHECK(::setresgid(65534, 65534, 65534) == 0 && ::setresuid(65534, 65534, 65534) == 0);
    CHECK_EQ(Reading({{memory.address(), 0, kPageBytes}}).Once(child.pid()).error, EPERM);
  });
}

constexpr std::array kFacts{
    Fact{"read: 1 to 2100 single pages, 1024 a call", ManySinglePages},
    Fact{"read: an unmapped page is named exactly", UnmappedHole},
    Fact{"read: a protected page is named exactly", ProtectedHole},
    Fact{"read: more than 2 GiB in one row", BeyondTwoGibibytes},
    Fact{"read: short reads go on, whatever the cut", ShortReadsGoOn},
    Fact{"read: interrupted calls are repeated", InterruptedCallsAreRepeated},
    Fact{"read: ENOMEM ends at its deadline", EnomemEndsAtItsDeadline},
    Fact{"read: a cancelled read makes no further call", ACancelledReadMakesNoFurtherCall},
    Fact{"read: an empty read is done", AnEmptyReadIsDone},
    Fact{"read: the dead are ESRCH, zombies too", TheDeadAreEsrch},
    Fact{"read: a refusing kernel is reported", ARefusingKernelIsReported},
    Fact{"read: another user's process is EPERM", AnotherUsersProcessIsEperm},
};

}  // namespace

std::span<const Fact> ReadFacts() { return kFacts; }

}  // namespace varve::test
