// The system calls whose failures tests inject, as a table. Everything else is called directly.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>

namespace varve {

struct Syscalls {
  ssize_t (*process_vm_readv)(pid_t pid, const iovec* local, unsigned long local_count,
                              const iovec* remote, unsigned long remote_count,
                              unsigned long flags);
  ssize_t (*preadv)(int fd, const iovec* iov, int count, off_t offset);
  ssize_t (*pwritev)(int fd, const iovec* iov, int count, off_t offset);
  std::uint64_t (*now_ns)();            // monotonic
  void (*sleep_ns)(std::uint64_t ns);   // may return early
};

// The kernel's.
const Syscalls& RealSyscalls() noexcept;

// Longest iovec array the kernel takes (UIO_MAXIOV); one more is EINVAL.
inline constexpr std::size_t kIovecsMax = 1024;

}  // namespace varve
