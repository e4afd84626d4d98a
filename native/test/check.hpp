// The smallest test frame that does: named facts, checks that say what they saw, children that must
// end as they should.
#pragma once

#include <sys/mman.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>

namespace varve::test {

using Body = void (*)();

struct Fact {
  const char* name;
  Body body;
};

// Each test file's facts, in the order they run.
std::span<const Fact> BitmapFacts();
std::span<const Fact> ReadFacts();
std::span<const Fact> FileFacts();
std::span<const Fact> ScanFacts();
std::span<const Fact> ProcessFacts();
std::span<const Fact> ThreadFacts();
std::span<const Fact> LayerFacts();

inline void Fail(const char* file, int line, const char* what, long long left, long long right) {
  std::fprintf(stderr, "%s:%d: %s (%lld, %lld)\n", file, line, what, left, right);
  std::abort();
}

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) ::varve::test::Fail(__FILE__, __LINE__, #condition, 0, 0);     \
  } while (false)

#define CHECK_EQ(a, b)                                                               \
  do {                                                                               \
    const auto left_ = (a);                                                          \
    const auto right_ = (b);                                                         \
    if (!(left_ == right_)) {                                                        \
      ::varve::test::Fail(__FILE__, __LINE__, #a " == " #b,                          \
                          static_cast<long long>(left_), static_cast<long long>(right_)); \
    }                                                                                \
  } while (false)

// Seeded, so that a failure repeats: SEED=… in the environment.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 2 + 1) {}
  std::uint64_t Next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ * 0x2545f4914f6cdd1d;
  }
  std::uint64_t Below(std::uint64_t bound) { return Next() % bound; }

 private:
  std::uint64_t state_;
};

std::uint64_t Seed();

// Anonymous private memory, unmapped at the end.
class Mapping {
 public:
  explicit Mapping(std::size_t bytes, int flags = MAP_PRIVATE | MAP_ANONYMOUS)
      : bytes_(bytes),
        memory_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, -1, 0)) {
    if (memory_ == MAP_FAILED) std::abort();
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { ::munmap(memory_, bytes_); }

  std::byte* data() const { return static_cast<std::byte*>(memory_); }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(memory_); }
  std::size_t size() const { return bytes_; }
  std::span<std::byte> span() const { return {data(), bytes_}; }

 private:
  std::size_t bytes_;
  void* memory_;
};

// A forked child that runs `prepare` on its copy of our memory and then waits to be killed. It
// tells through a pipe when it is ready, so nothing here sleeps.
class Child {
 public:
  template <typename Prepare>
  explicit Child(Prepare prepare) {
    int ready[2];
    if (::pipe(ready) != 0) std::abort();
    pid_ = ::fork();
    if (pid_ < 0) std::abort();
    if (pid_ == 0) {
      prepare();
      const ssize_t put = ::write(ready[1], "r", 1);
      if (put != 1) std::_Exit(1);
      for (;;) ::pause();
    }
    ::close(ready[1]);
    char byte = 0;
    const ssize_t got = ::read(ready[0], &byte, 1);
    ::close(ready[0]);
    if (got != 1) std::abort();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() { Reap(); }

  pid_t pid() const { return pid_; }
  // SIGKILL, and no more: the process stays a zombie.
  void Kill() {
    ::kill(pid_, SIGKILL);
    siginfo_t info{};
    ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT);
  }
  void Reap() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
};

// Runs `body` in a child, which must exit 0 by itself: no signal, no sanitizer report.
template <typename Work>
void InChild(Work body) {
  const pid_t pid = ::fork();
  if (pid < 0) std::abort();
  if (pid == 0) {
    body();
    std::_Exit(0);
  }
  int status = 0;
  if (::waitpid(pid, &status, 0) != pid) std::abort();
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 0);
}

}  // namespace varve::test
