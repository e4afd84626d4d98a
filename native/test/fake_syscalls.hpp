// System calls that fail, stop short, or take time, as a test says. One at a time: a table of plain
// functions has no place for state but a global.
#pragma once

#include <algorithm>
#include <cerrno>
#include <deque>

#include "check.hpp"
#include "core/syscalls.hpp"

namespace varve::test {

struct Script {
  std::deque<int> errors;         // each next call fails with the first of these; 0 lets it pass
  int error_always = 0;           // every call fails with this
  bool move_nothing = false;      // calls succeed and move no byte
  Random* shorten = nullptr;      // calls move a random part of what they are asked for
  std::uint64_t now_ns = 1;       // moves only by the costs below
  std::uint64_t call_cost_ns = 0;
  std::uint64_t calls = 0;
  std::size_t iovecs_max = 0;     // longest array seen
  std::uint64_t bytes_max = 0;    // most bytes one call was asked for
  std::uint64_t slept_ns = 0;
  std::int32_t* set_on_call = nullptr;  // set to 1 by the call numbered set_call
  std::uint64_t set_call = 0;
};

inline Script script;

// Whether the scripted call fails; sets errno.
inline bool Fails(std::size_t iovec_count) {
  script.calls += 1;
  script.now_ns += script.call_cost_ns;
  script.iovecs_max = std::max(script.iovecs_max, iovec_count);
  if (script.set_on_call != nullptr && script.calls == script.set_call) *script.set_on_call = 1;
  int error = script.error_always;
  if (!script.errors.empty()) {
    error = script.errors.front();
    script.errors.pop_front();
  }
  errno = error;
  return error != 0;
}

// The iovecs, cut to a random shorter length where the script wants that. At least one byte.
inline std::deque<iovec> Shorten(const iovec* iovecs, std::size_t count) {
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < count; ++i) total += iovecs[i].iov_len;
  script.bytes_max = std::max(script.bytes_max, total);
  std::uint64_t left = total;
  if (script.shorten != nullptr && total > 1) left = 1 + script.shorten->Below(total);
  std::deque<iovec> cut;
  for (std::size_t i = 0; i < count && left > 0; ++i) {
    const std::uint64_t length = std::min<std::uint64_t>(left, iovecs[i].iov_len);
    cut.push_back({iovecs[i].iov_base, length});
    left -= length;
  }
  return cut;
}

inline ssize_t FakeReadv(pid_t, const iovec* local, unsigned long local_count, const iovec* remote,
                         unsigned long remote_count, unsigned long flags) {
  CHECK(local_count == 1 && remote_count > 0 && remote_count <= kIovecsMax && flags == 0);
  if (Fails(remote_count)) return -1;
  if (script.move_nothing) return 0;
  auto* to = static_cast<std::byte*>(local->iov_base);
  std::uint64_t done = 0;
  for (const iovec& from : Shorten(remote, remote_count)) {
    std::memcpy(to + done, from.iov_base, from.iov_len);
    done += from.iov_len;
  }
  CHECK(done <= local->iov_len);
  return static_cast<ssize_t>(done);
}

inline ssize_t FakePreadv(int fd, const iovec* iov, int count, off_t offset) {
  if (Fails(static_cast<std::size_t>(count))) return -1;
  if (script.move_nothing) return 0;
  const auto cut = Shorten(iov, static_cast<std::size_t>(count));
  return ::preadv(fd, &cut.front(), 1, offset);
}

inline ssize_t FakePwritev(int fd, const iovec* iov, int count, off_t offset) {
  CHECK(count > 0 && static_cast<std::size_t>(count) <= kIovecsMax);
  if (Fails(static_cast<std::size_t>(count))) return -1;
  if (script.move_nothing) return 0;
  ssize_t done = 0;
  for (const iovec& from : Shorten(iov, static_cast<std::size_t>(count))) {
    done += ::pwrite(fd, from.iov_base, from.iov_len, offset + done);
  }
  return done;
}

inline std::uint64_t FakeNow() { return script.now_ns; }
inline void FakeSleep(std::uint64_t ns) {
  script.now_ns += ns;
  script.slept_ns += ns;
}

inline constexpr Syscalls kFake{FakeReadv, FakePreadv, FakePwritev, FakeNow, FakeSleep};

}  // namespace varve::test
