#include <sys/prctl.h>

#include <array>
#include <csignal>

#include "check.hpp"
#include "core/thread_runs.hpp"

namespace varve::test {
namespace {

constexpr std::array kSources{RunsSource::kSchedstat, RunsSource::kSwitches};

// A child says that it is ready, and is asleep a little later.
ThreadRuns Asleep(pid_t pid, RunsSource source) {
  for (;;) {
    const ThreadRuns runs = ReadThreadRuns(pid, pid, source, true);
    CHECK_EQ(runs.error, 0);
    if (runs.asleep) return runs;
    ::usleep(100);
  }
}

// Two looks with a pause in between say the same: the first was no thread on its way to sleep.
ThreadRuns Rested(pid_t pid, RunsSource source) {
  for (ThreadRuns before = Asleep(pid, source);;) {
    ::usleep(1000);
    const ThreadRuns now = Asleep(pid, source);
    if (now.turns == before.turns && now.ran_ns == before.ran_ns) return now;
    before = now;
  }
}

void AThreadThatWaitsHasNoTurns() {
  for (const RunsSource source : kSources) {
    for (const char* name : {"fc_vcpu 0", ") R 1", "\nvoluntary_ctx"}) {
      Child child([&] {
        ::prctl(PR_SET_NAME, name);
        ::signal(SIGUSR1, [](int) {});
      });
      const ThreadRuns before = Rested(child.pid(), source);
      const ThreadRuns again = ReadThreadRuns(child.pid(), child.pid(), source, true);
      CHECK(again.asleep && again.turns == before.turns && again.ran_ns == before.ran_ns);
      ::kill(child.pid(), SIGUSR1);
      CHECK(Rested(child.pid(), source).turns > before.turns);
    }
  }
}

void AThreadThatRunsIsNotAsleep() {
  for (const RunsSource source : kSources) {
    const ThreadRuns own = ReadThreadRuns(::getpid(), ::gettid(), source, true);
    CHECK(own.error == 0 && !own.asleep && own.turns > 0);
    CHECK(!ReadThreadRuns(::getpid(), ::gettid(), source, false).asleep);
    CHECK(ReadThreadRuns(0x3fffffff, 0x3fffffff, source, true).error != 0);
  }
}

constexpr std::array kFacts{
    Fact{"threads: one that waits has no turns", AThreadThatWaitsHasNoTurns},
    Fact{"threads: one that runs is not asleep", AThreadThatRunsIsNotAsleep},
};

}  // namespace

std::span<const Fact> ThreadFacts() { return kFacts; }

}  // namespace varve::test
