#include "supervisor/vm_api.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <ctime>
#include <string_view>

#include "core/process.hpp"
#include "core/unique_fd.hpp"

namespace varve::supervisor {
namespace {

constexpr std::uint64_t kNsPerMs = 1'000'000;
constexpr std::uint64_t kBacklogNapNs = 5 * kNsPerMs;
constexpr std::size_t kResponseBytesMax = 64 * 1024;

constexpr std::string_view kResumeRequest =
    "PATCH /vm HTTP/1.1\r\n"
    "Host: localhost\r\n"
    "Accept: application/json\r\n"
    "Content-Type: application/json\r\n"
    "Content-Length: 19\r\n"
    "\r\n"
    "{\"state\":\"Resumed\"}";
constexpr std::string_view kStateRequest =
    "GET / HTTP/1.1\r\n"
    "Host: localhost\r\n"
    "Accept: application/json\r\n"
    "\r\n";

bool WaitFor(int fd, short events, std::uint64_t deadline_ns) {
  for (;;) {
    const std::uint64_t now = NowNs();
    if (now >= deadline_ns) return false;
    pollfd entry{fd, events, 0};
    const auto ms = static_cast<int>((deadline_ns - now) / kNsPerMs + 1);
    const int ready = ::poll(&entry, 1, ms);
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
  }
}

enum class Connected { kYes, kRetry, kGone };

// Connects, and makes sure that who listens is who was paused.
Connected Connect(const PausedVm& vm, std::uint64_t deadline_ns, UniqueFd& out) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (vm.socket_path.size() >= sizeof address.sun_path) return Connected::kGone;
  std::memcpy(address.sun_path, vm.socket_path.data(), vm.socket_path.size());
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return Connected::kRetry;
  // SAFETY: the sockets API takes every address as sockaddr.
  while (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    if (errno == ENOENT || errno == ECONNREFUSED || errno == ENOTDIR) return Connected::kGone;
    if ((errno != EAGAIN && errno != EINTR) || NowNs() >= deadline_ns) return Connected::kRetry;
    SleepNs(kBacklogNapNs);
  }
  ucred peer{};
  socklen_t length = sizeof peer;
  if (::getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    return Connected::kRetry;
  }
  if (peer.pid != vm.pid) return Connected::kGone;
  const StartTime start = ReadStartTime(vm.pid);
  if (start.error != 0 || start.ticks != vm.start_ticks) return Connected::kGone;
  out = std::move(fd);
  return Connected::kYes;
}

bool SendAll(int fd, std::string_view text, std::uint64_t deadline_ns) {
  while (!text.empty()) {
    const ssize_t sent = ::send(fd, text.data(), text.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      text.remove_prefix(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN) {
      if (!WaitFor(fd, POLLOUT, deadline_ns)) return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

struct Response {
  int status = 0;  // 0: none came in time
  std::string body;
};

// Value of a header, whose name is compared without case; empty where there is none.
std::string_view Header(std::string_view head, std::string_view name) {
  for (std::size_t at = head.find("\r\n"); at != std::string_view::npos;
       at = head.find("\r\n", at + 2)) {
    std::string_view line = head.substr(at + 2, head.find("\r\n", at + 2) - at - 2);
    if (line.size() <= name.size() || line[name.size()] != ':') continue;
    if (::strncasecmp(line.data(), name.data(), name.size()) != 0) continue;
    line.remove_prefix(name.size() + 1);
    line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
    return line;
  }
  return {};
}

// Whether `text` is a whole response; fills `out` when it is. `ended`: nothing more will come.
bool Parse(std::string_view text, bool ended, Response& out) {
  const std::size_t head_end = text.find("\r\n\r\n");
  if (head_end == std::string_view::npos || !text.starts_with("HTTP/1.")) return false;
  const std::string_view head = text.substr(0, head_end);
  const std::size_t space = head.find(' ');
  int status = 0;
  if (space == std::string_view::npos) return false;
  std::from_chars(head.data() + space + 1, head.data() + head.size(), status);
  const std::string_view body = text.substr(head_end + 4);
  const std::string_view length_text = Header(head, "content-length");
  std::size_t length = 0;
  if (!length_text.empty()) {
    std::from_chars(length_text.data(), length_text.data() + length_text.size(), length);
  }
  const bool chunked = !Header(head, "transfer-encoding").empty();
  const bool whole = chunked ? body.find("\r\n0\r\n") != std::string_view::npos
                             : body.size() >= length;
  if (!whole && !ended) return false;
  out.status = status;
  out.body = std::string(body);
  return true;
}

Response Receive(int fd, std::uint64_t deadline_ns) {
  Response out;
  std::string text;
  char piece[4096];
  while (text.size() < kResponseBytesMax) {
    const ssize_t got = ::recv(fd, piece, sizeof piece, 0);
    if (got > 0) {
      text.append(piece, static_cast<std::size_t>(got));
      if (Parse(text, false, out)) return out;
    } else if (got == 0) {
      Parse(text, true, out);
      return out;
    } else if (errno == EAGAIN) {
      if (!WaitFor(fd, POLLIN, deadline_ns)) return out;
    } else if (errno != EINTR) {
      return out;
    }
  }
  return out;
}

Connected Exchange(const PausedVm& vm, std::string_view request, std::uint64_t deadline_ns,
                   Response& out) {
  UniqueFd fd;
  const Connected connected = Connect(vm, deadline_ns, fd);
  if (connected != Connected::kYes) return connected;
  if (!SendAll(fd.get(), request, deadline_ns)) return Connected::kRetry;
  out = Receive(fd.get(), deadline_ns);
  return out.status == 0 ? Connected::kRetry : Connected::kYes;
}

}  // namespace

Answer SendResume(const PausedVm& vm, std::uint64_t deadline_ns) {
  Response response;
  const Connected outcome = Exchange(vm, kResumeRequest, deadline_ns, response);
  if (outcome == Connected::kGone) return Answer::kGone;
  if (outcome == Connected::kRetry) return Answer::kFailed;
  return response.status >= 200 && response.status < 300 ? Answer::kDone : Answer::kRefused;
}

VmState AskState(const PausedVm& vm, std::uint64_t deadline_ns) {
  Response response;
  if (Exchange(vm, kStateRequest, deadline_ns, response) != Connected::kYes) {
    return VmState::kUnknown;
  }
  const std::size_t key = response.body.find("\"state\"");
  if (response.status != 200 || key == std::string::npos) return VmState::kUnknown;
  const std::size_t value = response.body.find('"', response.body.find(':', key));
  if (value == std::string::npos) return VmState::kUnknown;
  const std::string_view rest = std::string_view(response.body).substr(value);
  if (rest.starts_with("\"Running\"")) return VmState::kRunning;
  if (rest.starts_with("\"Paused\"")) return VmState::kPaused;
  return VmState::kUnknown;
}

std::uint64_t NowNs() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(now.tv_nsec);
}

void SleepNs(std::uint64_t ns) {
  timespec left{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  while (::nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

}  // namespace varve::supervisor
