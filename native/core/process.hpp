// Who a process is: socket peer credentials, pidfd, start time.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string_view>

#include "core/slice.hpp"
#include "core/unique_fd.hpp"

namespace varve {

struct PeerCredentials {
  pid_t pid;
  uid_t uid;
  gid_t gid;
  int error;  // 0, or an errno; EAGAIN: the backlog was full for the whole slice
};

// Connects to the Unix socket at `path`, asks the kernel who made it listen, and closes. The answer
// is of the process that called listen(2), as of that call.
PeerCredentials ReadPeerCredentials(std::string_view path, const Slice& slice,
                                    const Syscalls& sys = RealSyscalls()) noexcept;

// A descriptor that stands for process `pid` and no later one of that number. Close-on-exec.
UniqueFd OpenPidfd(pid_t pid, int& error) noexcept;

// Whether the process has exited (a zombie has). Never blocks.
bool PidfdExited(int pidfd) noexcept;

struct StartTime {
  std::uint64_t ticks;  // clock ticks after boot: field 22 of /proc/<pid>/stat
  int error;            // ESRCH where there is no such process
};

StartTime ReadStartTime(pid_t pid) noexcept;

}  // namespace varve
