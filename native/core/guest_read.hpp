// process_vm_readv: bytes of another process, packed.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/slice.hpp"
#include "core/syscalls.hpp"
#include "core/units.hpp"

namespace varve {

struct ReadOutcome {
  std::uint64_t bytes_done;  // of all rows, counted from the first row's first byte
  std::uint64_t syscalls;    // made by this call
  std::uint64_t stalled_ns;  // how long ENOMEM has lasted without one byte read; 0 after progress
  std::uint64_t address;     // with EFAULT: the page that cannot be read; of a file: the offset
  int error;                 // 0, or the errno of the failing call
  bool done;                 // every row is read
  bool cancelled;
};

struct ReadRequest {
  std::span<const Row> rows;
  std::span<std::byte> dest;   // row bytes go here one after another; as long as the rows at least
  std::uint64_t from;          // bytes already read by earlier calls
  std::uint64_t stalled_ns;    // of the previous call's outcome
  std::uint64_t stalled_ns_max;
  // Most bytes one system call is asked for. Keeps calls short enough to poll between them, and
  // below the kernel's own cap of 2147479552 bytes, past which it would answer short.
  std::uint64_t call_bytes_max = 8u << 20;
};

// Sum of the rows' lengths; UINT64_MAX where that does not fit.
std::uint64_t RowBytes(std::span<const Row> rows) noexcept;

// Reads rows of process `pid`, at most kIovecsMax of them a call. Short reads go on where they
// ended; EINTR and EAGAIN are retried; ENOMEM is retried with a short sleep until it has lasted
// stalled_ns_max; anything else is the outcome's error. Returns when done, cancelled, failed, or
// when the slice is over. Never throws.
ReadOutcome ReadGuestRows(pid_t pid, const ReadRequest& request, const Slice& slice,
                          const Syscalls& sys = RealSyscalls()) noexcept;

}  // namespace varve
