// pwritev: all of it, however often the kernel takes less.
#pragma once

#include <cstdint>
#include <span>

#include "core/slice.hpp"
#include "core/syscalls.hpp"

namespace varve {

struct WriteOutcome {
  std::uint64_t bytes_done;  // of all iovecs, counted from the first one's first byte
  std::uint64_t syscalls;
  int error;  // 0, or the errno of the failing call
  bool done;
  bool cancelled;
};

// Writes the iovecs one after another at file offset `offset`, starting `from` bytes into them (the
// bytes_done of an earlier call). Short writes go on where they ended; EINTR and EAGAIN are
// retried; a write of nothing is EIO. Returns when done, cancelled, failed, or when the slice is
// over.
WriteOutcome WriteAll(int fd, std::span<const iovec> iovecs, std::uint64_t offset,
                      std::uint64_t from, const Slice& slice,
                      const Syscalls& sys = RealSyscalls(),
                      std::uint64_t call_bytes_max = 8u << 20) noexcept;

}  // namespace varve
