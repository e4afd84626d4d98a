#include "core/process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>

namespace varve {
namespace {

constexpr std::uint64_t kBacklogNapNs = 1'000'000;

// Field `number` (1-based) of a stat line. The name, field 2, may hold spaces and parentheses, so
// fields are counted from its last closing one.
std::string_view StatField(std::string_view line, int number) noexcept {
  const std::size_t name_end = line.rfind(')');
  if (name_end == std::string_view::npos) return {};
  line.remove_prefix(name_end + 1);
  for (int field = 3;; ++field) {
    const std::size_t start = line.find_first_not_of(' ');
    if (start == std::string_view::npos) return {};
    line.remove_prefix(start);
    const std::size_t end = line.find_first_of(" \n");
    if (field == number) return line.substr(0, end);
    if (end == std::string_view::npos) return {};
    line.remove_prefix(end);
  }
}

}  // namespace

PeerCredentials ReadPeerCredentials(std::string_view path, const Slice& slice,
                                    const Syscalls& sys) noexcept {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.find('\0') != std::string_view::npos) return {0, 0, 0, EINVAL};
  if (path.size() >= sizeof address.sun_path) return {0, 0, 0, ENAMETOOLONG};
  std::memcpy(address.sun_path, path.data(), path.size());
  const UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return {0, 0, 0, errno};
  // A non-blocking connect to a Unix socket succeeds or fails at once; EAGAIN is a full backlog,
  // which poll(2) cannot wait for.
  // SAFETY: the sockets API takes every address as sockaddr.
  while (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    const int error = errno;
    if ((error != EAGAIN && error != EINTR) || slice.Expired()) return {0, 0, 0, error};
    sys.sleep_ns(kBacklogNapNs);
  }
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return {0, 0, 0, errno};
  }
  return {credentials.pid, credentials.uid, credentials.gid, 0};
}

UniqueFd OpenPidfd(pid_t pid, int& error) noexcept {
  UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  error = fd ? 0 : errno;
  return fd;
}

bool PidfdExited(int pidfd) noexcept {
  pollfd poll_for{pidfd, POLLIN, 0};
  int ready = 0;
  do {
    ready = ::poll(&poll_for, 1, 0);
  } while (ready < 0 && errno == EINTR);
  return ready > 0 && (poll_for.revents & POLLIN) != 0;
}

StartTime ReadStartTime(pid_t pid) noexcept {
  std::array<char, 40> path;
  std::snprintf(path.data(), path.size(), "/proc/%d/stat", static_cast<int>(pid));
  const UniqueFd fd(::open(path.data(), O_RDONLY | O_CLOEXEC));
  if (!fd) return {0, errno == ENOENT ? ESRCH : errno};
  std::array<char, 2048> text;
  ssize_t got = 0;
  do {
    got = ::read(fd.get(), text.data(), text.size());
  } while (got < 0 && errno == EINTR);
  if (got < 0) return {0, errno};
  const std::string_view line(text.data(), static_cast<std::size_t>(got));
  const std::string_view field = StatField(line, 22);
  StartTime out{0, 0};
  const auto parsed = std::from_chars(field.data(), field.data() + field.size(), out.ticks);
  if (field.empty() || parsed.ec != std::errc{}) out.error = EIO;
  return out;
}

}  // namespace varve
