// The two requests of the Firecracker API that the supervisor makes, each on a connection of its own.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace varve::supervisor {

// A VM that the daemon paused, as it was when it did.
struct PausedVm {
  std::uint64_t key;          // the daemon's name for it
  pid_t pid;                  // with start_ticks, one process for good
  std::uint64_t start_ticks;  // field 22 of /proc/<pid>/stat
  std::string socket_path;
};

enum class Answer {
  kDone,     // the VMM answered 2xx
  kRefused,  // the VMM answered something else
  kFailed,   // no whole answer in time; worth another try
  kGone,     // nobody listens, or not the process that was paused
};

enum class VmState { kRunning, kPaused, kUnknown };

// Sends `PATCH /vm Resumed` and waits for the answer until `deadline_ns` (monotonic).
Answer SendResume(const PausedVm& vm, std::uint64_t deadline_ns);

// Asks `GET /`. kUnknown where there is no answer in time, or none that says.
VmState AskState(const PausedVm& vm, std::uint64_t deadline_ns);

// Monotonic clock, nanoseconds.
std::uint64_t NowNs();

void SleepNs(std::uint64_t ns);

}  // namespace varve::supervisor
