#include "minivm/uffd.hpp"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace minivm {
namespace {

Failure Open(UffdLink& link) {
  link.uffd = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK));
  if (link.uffd < 0) return FailErrno("Cannot create a userfaultfd", errno);
  uffdio_api api{};
  api.api = UFFD_API;
  api.features = UFFD_FEATURE_EVENT_REMOVE;
  if (ioctl(link.uffd, UFFDIO_API, &api) != 0) return FailErrno("UFFDIO_API", errno);
  return std::nullopt;
}

Failure Register(const GuestMemory& memory, const UffdLink& link, std::string& mappings) {
  mappings = "[";
  for (const auto& region : memory.regions()) {
    uffdio_register request{};
    // SAFETY: the region stays mapped as long as the Machine, which closes the uffd first.
    request.range.start = reinterpret_cast<std::uint64_t>(region->host);
    request.range.len = region->bytes;
    request.mode = UFFDIO_REGISTER_MODE_MISSING;
    if (ioctl(link.uffd, UFFDIO_REGISTER, &request) != 0)
      return FailErrno("UFFDIO_REGISTER", errno);
    if (mappings.size() > 1) mappings += ',';
    mappings += "{\"base_host_virt_addr\":" + std::to_string(request.range.start) +
                ",\"size\":" + std::to_string(region->bytes) +
                ",\"offset\":" + std::to_string(region->image_offset) +
                ",\"page_size\":" + std::to_string(kPageBytes) +
                ",\"page_size_kib\":" + std::to_string(kPageBytes) + "}";
  }
  mappings += "]";
  return std::nullopt;
}

Failure Send(const UffdLink& link, const std::string& mappings) {
  iovec part{};
  part.iov_base = const_cast<char*>(mappings.data());
  part.iov_len = mappings.size();
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &link.uffd, sizeof(int));
  const ssize_t sent = sendmsg(link.socket, &message, MSG_NOSIGNAL);
  if (sent < 0) return FailErrno("Cannot send the userfaultfd", errno);
  if (static_cast<std::size_t>(sent) != mappings.size())
    return "The userfaultfd message was cut short";
  return std::nullopt;
}

}  // namespace

Failure ConnectUffd(const GuestMemory& memory, const std::string& socket_path, UffdLink& link) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (socket_path.size() >= sizeof address.sun_path) return "The handler's socket path is too long";
  std::memcpy(address.sun_path, socket_path.data(), socket_path.size());
  if (Failure failure = Open(link)) return failure;
  std::string mappings;
  if (Failure failure = Register(memory, link, mappings)) return failure;
  link.socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (link.socket < 0) return FailErrno("Cannot create a socket", errno);
  // SAFETY: sockaddr_un is what connect(2) takes for AF_UNIX.
  if (connect(link.socket, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    return FailErrno("Cannot connect to the page-fault handler at " + socket_path, errno);
  }
  return Send(link, mappings);
}

}  // namespace minivm
