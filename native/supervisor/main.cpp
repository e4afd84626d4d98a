// varve-supervisor: resumes VMs whose daemon died while it had them paused.
//
//   varve-supervisor --lock FILE [--report FILE]     (started by the daemon; stdin: see paused_set.hpp)
//
// It waits for the lock, prints "ready", and follows what the daemon says. When stdin ends, whatever
// ended the daemon, it resumes every VM that is still paused by it, looks twice whether a pause that
// was under way came in after all, appends a line per VM to the report (read by supervisor-report.ts
// of the next daemon), and exits. The lock is held
// until then: the next daemon's supervisor becomes ready, and its captures begin, only after this one
// can no longer resume anything. Exit status 0; 1 where a VM could not be resumed; 2 for bad use.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "core/unique_fd.hpp"
#include "supervisor/paused_set.hpp"
#include "supervisor/vm_api.hpp"

namespace varve::supervisor {
namespace {

constexpr std::uint64_t kNsPerMs = 1'000'000;
constexpr std::uint64_t kRequestNs = 1'000 * kNsPerMs;
constexpr std::uint64_t kRetryNapNs = 20 * kNsPerMs;
// After this a VMM that does not answer is given up.
constexpr std::uint64_t kGiveUpNs = 30'000 * kNsPerMs;
// When to look again after a resume: the daemon's own pause may have been on its way.
constexpr std::array<std::uint64_t, 2> kLookAgainNs = {100 * kNsPerMs, 400 * kNsPerMs};

enum class Outcome { kResumed, kGone, kFailed };

struct Job {
  const PausedVm* vm;
  std::uint64_t began_ns;
  Outcome outcome = Outcome::kFailed;
  std::uint64_t resumed_ns = 0;
};

Outcome ResumeUntilAnswered(const PausedVm& vm, std::uint64_t give_up_ns) {
  while (NowNs() < give_up_ns) {
    switch (SendResume(vm, NowNs() + kRequestNs)) {
      case Answer::kDone:
        return Outcome::kResumed;
      case Answer::kGone:
        return Outcome::kGone;
      // Neither is proof that the VM stands: an answer may be lost, or speak of what came later.
      case Answer::kRefused:
      case Answer::kFailed:
        if (AskState(vm, NowNs() + kRequestNs) == VmState::kRunning) return Outcome::kResumed;
        break;
    }
    SleepNs(kRetryNapNs);
  }
  return Outcome::kFailed;
}

void Run(Job& job) {
  const std::uint64_t give_up_ns = job.began_ns + kGiveUpNs;
  job.outcome = ResumeUntilAnswered(*job.vm, give_up_ns);
  job.resumed_ns = NowNs();
  if (job.outcome != Outcome::kResumed) return;
  for (const std::uint64_t after : kLookAgainNs) {
    const std::uint64_t at = job.resumed_ns + after;
    if (const std::uint64_t now = NowNs(); now < at) SleepNs(at - now);
    if (AskState(*job.vm, NowNs() + kRequestNs) == VmState::kPaused) {
      job.outcome = ResumeUntilAnswered(*job.vm, give_up_ns);
    }
  }
}

void* RunThread(void* job) {
  // SAFETY: the job outlives the thread; ResumeAll joins it.
  Run(*static_cast<Job*>(job));
  return nullptr;
}

// Every VM on a thread of its own, so that one that hangs delays no other.
std::vector<Job> ResumeAll(const std::vector<PausedVm>& vms) {
  const std::uint64_t now = NowNs();
  std::vector<Job> jobs;
  jobs.reserve(vms.size());
  for (const PausedVm& vm : vms) jobs.push_back({&vm, now});
  std::vector<pthread_t> threads;
  for (Job& job : jobs) {
    pthread_t thread{};
    if (::pthread_create(&thread, nullptr, RunThread, &job) == 0) {
      threads.push_back(thread);
    } else {
      Run(job);
    }
  }
  for (const pthread_t thread : threads) ::pthread_join(thread, nullptr);
  return jobs;
}

void Report(int fd, const std::vector<Job>& jobs) {
  constexpr std::array<const char*, 3> kWords = {"resumed", "gone", "failed"};
  for (const Job& job : jobs) {
    std::string line = kWords[static_cast<std::size_t>(job.outcome)];
    line += " after " + std::to_string((job.resumed_ns - job.began_ns) / kNsPerMs) + " ms: pid ";
    line += std::to_string(job.vm->pid) + " start " + std::to_string(job.vm->start_ticks);
    line += " " + job.vm->socket_path + "\n";
    // Nothing can be done about a report that cannot be written.
    if (fd >= 0) [[maybe_unused]] const ssize_t written = ::write(fd, line.data(), line.size());
  }
}

bool TakeLock(int fd) {
  while (::flock(fd, LOCK_EX) != 0) {
    if (errno != EINTR) return false;
  }
  return true;
}

void IgnoreSignals() {
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  for (const int signal : {SIGHUP, SIGINT, SIGTERM, SIGPIPE, SIGQUIT, SIGUSR1, SIGUSR2}) {
    ::sigaction(signal, &ignore, nullptr);
  }
}

// Follows the daemon until its end of the pipe is closed.
void Follow(PausedSet& paused) {
  std::array<char, 4096> piece;
  for (;;) {
    const ssize_t got = ::read(STDIN_FILENO, piece.data(), piece.size());
    if (got > 0) {
      if (!paused.Feed({piece.data(), static_cast<std::size_t>(got)})) {
        std::fputs("varve-supervisor: skipped a malformed line\n", stderr);
      }
    } else if (got == 0 || errno != EINTR) {
      return;
    }
  }
}

int Main(const char* lock_path, const char* report_path) {
  ::setsid();
  IgnoreSignals();
  const UniqueFd lock(::open(lock_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!lock || !TakeLock(lock.get())) {
    std::fprintf(stderr, "varve-supervisor: %s: %s\n", lock_path, std::strerror(errno));
    return 2;
  }
  UniqueFd report;
  if (report_path != nullptr) {
    report.Reset(::open(report_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  }
  if (::chdir("/") != 0) return 2;
  constexpr std::string_view kReady = "ready\n";
  if (::write(STDOUT_FILENO, kReady.data(), kReady.size()) < 0 && errno != EPIPE) return 2;
  PausedSet paused;
  Follow(paused);
  const std::vector<Job> jobs = ResumeAll(paused.vms());
  Report(report.get(), jobs);
  for (const Job& job : jobs) {
    if (job.outcome == Outcome::kFailed) return 1;
  }
  return 0;
}

}  // namespace
}  // namespace varve::supervisor

int main(int argc, char** argv) {
  const char* lock = nullptr;
  const char* report = nullptr;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--lock") == 0) lock = argv[i + 1];
    if (std::strcmp(argv[i], "--report") == 0) report = argv[i + 1];
  }
  if (lock == nullptr || argc % 2 == 0) {
    std::fputs("usage: varve-supervisor --lock FILE [--report FILE]\n", stderr);
    return 2;
  }
  return varve::supervisor::Main(lock, report);
}
