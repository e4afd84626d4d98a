#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <string>
#include <vector>

#include "check.hpp"
#include "core/process.hpp"
#include "fake_syscalls.hpp"

namespace varve::test {
namespace {

// A folder of this test's own, removed with the one socket in it.
struct SocketFolder {
  std::array<char, 32> folder{"/tmp/varve-test-XXXXXX"};
  std::string path;

  SocketFolder() {
    CHECK(::mkdtemp(folder.data()) != nullptr);
    path = std::string(folder.data()) + "/api.sock";
  }
  ~SocketFolder() {
    ::unlink(path.c_str());
    ::rmdir(folder.data());
  }
  UniqueFd Listen(int backlog) const {
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    CHECK_EQ(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    CHECK_EQ(::listen(fd.get(), backlog), 0);
    return fd;
  }
};

PeerCredentials Peer(const std::string& path, const Syscalls& sys = RealSyscalls()) {
  return ReadPeerCredentials(path, Slice(sys, nullptr), sys);
}

void TheListenerIsNamed() {
  const SocketFolder folder;
  CHECK_EQ(Peer(folder.path).error, ENOENT);
  Child child([&] { folder.Listen(8).Release(); });
  const auto peer = Peer(folder.path);
  CHECK_EQ(peer.error, 0);
  CHECK_EQ(peer.pid, child.pid());
  CHECK_EQ(peer.uid, ::getuid());
  child.Reap();
  CHECK_EQ(Peer(folder.path).error, ECONNREFUSED);
  CHECK_EQ(Peer("").error, EINVAL);
  CHECK_EQ(Peer(std::string("a\0b", 3)).error, EINVAL);
  CHECK_EQ(Peer(std::string(108, 'x')).error, ENAMETOOLONG);
}

void AFullBacklogEndsWithTheSlice() {
  const SocketFolder folder;
  const UniqueFd listener = folder.Listen(0);
  std::vector<UniqueFd> waiting;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, folder.path.data(), folder.path.size());
  for (;;) {
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const auto* target = reinterpret_cast<const sockaddr*>(&address);
    if (::connect(fd.get(), target, sizeof address) != 0) break;
    waiting.push_back(std::move(fd));
  }
  script = Script{};
  CHECK_EQ(Peer(folder.path, kFake).error, EAGAIN);
  CHECK(script.slept_ns >= kSliceNs && script.slept_ns < 2 * kSliceNs);
}

void APidfdTellsOfTheExit() {
  Child child([] {});
  int error = 0;
  const UniqueFd fd = OpenPidfd(child.pid(), error);
  CHECK_EQ(error, 0);
  CHECK((::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC) != 0);
  CHECK(!PidfdExited(fd.get()));
  child.Kill();
  CHECK(PidfdExited(fd.get()));  // a zombie has exited
  const pid_t pid = child.pid();
  child.Reap();
  CHECK(PidfdExited(fd.get()));
  CHECK(!OpenPidfd(pid, error));
  CHECK_EQ(error, ESRCH);
  CHECK(!PidfdExited(-1));
}

void StartTimesOfOddNames() {
  const StartTime own = ReadStartTime(::getpid());
  CHECK(own.error == 0 && own.ticks > 0);
  for (const char* name : {"a) R 1 2 (b", ")", "((((", " ", "x y z"}) {
    Child child([&] { ::prctl(PR_SET_NAME, name); });
    const StartTime start = ReadStartTime(child.pid());
    CHECK_EQ(start.error, 0);
    // Not before us, and not a minute of ticks after: the right field.
    CHECK(start.ticks >= own.ticks);
    CHECK(start.ticks <= own.ticks + 3600u * static_cast<std::uint64_t>(::sysconf(_SC_CLK_TCK)));
  }
  CHECK_EQ(ReadStartTime(0x3fffffff).error, ESRCH);
}

constexpr std::array kFacts{
    Fact{"process: the listener of a socket is named", TheListenerIsNamed},
    Fact{"process: a full backlog ends with the slice", AFullBacklogEndsWithTheSlice},
    Fact{"process: a pidfd tells of the exit", APidfdTellsOfTheExit},
    Fact{"process: start times of odd names", StartTimesOfOddNames},
};

}  // namespace

std::span<const Fact> ProcessFacts() { return kFacts; }

}  // namespace varve::test
