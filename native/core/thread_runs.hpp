// Whether a thread has been on a processor: how a guest that ran, though it should stand still, is
// noticed. A vCPU of a paused VM waits in its thread and is not scheduled at all.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace varve {

struct ThreadRuns {
  // Changes whenever the thread is put on a processor, and at no other time while it sleeps. Compared
  // only with other values of the same source.
  std::uint64_t ran_ns = 0;  // time on processors; 0 from kSwitches
  std::uint64_t turns = 0;   // how often it was put on one, or taken off one (kSwitches)
  bool asleep = false;       // waits for an event; false unless asked for
  int error = 0;             // ENOENT, ESRCH: no such thread; ENODATA: not told of it
};

enum class RunsSource : std::uint8_t {
  kSchedstat,  // /proc/<pid>/task/<tid>/schedstat: needs CONFIG_SCHED_INFO
  kSwitches,   // context switches in .../status: a thread that runs has not been counted yet
};

// Three small files of the kernel's; never blocks on the process. `with_state` fills `asleep`, which
// is read first: a thread that was asleep then, and whose turns are the same later, has not run in
// between.
ThreadRuns ReadThreadRuns(pid_t pid, pid_t tid, RunsSource source, bool with_state) noexcept;

}  // namespace varve
