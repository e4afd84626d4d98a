// A page-fault handler for tests: `uffd_handler SOCKET MEMORY_FILE`. Listens, takes one VM's
// userfaultfd, serves its missing pages from the memory file (zero where removed), and prints the
// number of pages served when the VM is gone.
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

namespace {

constexpr std::uint64_t kPageBytes = 4096;

struct Mapping {
  std::uint64_t host;
  std::uint64_t size;
  std::uint64_t offset;
};

void Die(const char* what) {
  std::perror(what);
  std::exit(1);
}

std::uint64_t Field(const std::string& object, const std::string& name) {
  const std::size_t at = object.find("\"" + name + "\":");
  if (at == std::string::npos) Die("a mapping lacks a field");
  return std::strtoull(object.c_str() + at + name.size() + 3, nullptr, 10);
}

std::vector<Mapping> Parse(const std::string& text) {
  std::vector<Mapping> mappings;
  for (std::size_t at = text.find('{'); at != std::string::npos; at = text.find('{', at + 1)) {
    const std::string object = text.substr(at, text.find('}', at) - at);
    if (Field(object, "page_size") != kPageBytes) Die("another page size");
    mappings.push_back(
        {Field(object, "base_host_virt_addr"), Field(object, "size"), Field(object, "offset")});
  }
  return mappings;
}

int Listen(const char* path) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path, sizeof address.sun_path - 1);
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) Die("bind");
  if (listen(fd, 1) != 0) Die("listen");
  return fd;
}

int Receive(int socket_fd, std::string& text) {
  char data[65536];
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  iovec part{data, sizeof data};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t n = recvmsg(socket_fd, &message, MSG_CMSG_CLOEXEC);
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (n <= 0 || header == nullptr || header->cmsg_type != SCM_RIGHTS) Die("no userfaultfd came");
  text.assign(data, static_cast<std::size_t>(n));
  int uffd = -1;
  std::memcpy(&uffd, CMSG_DATA(header), sizeof uffd);
  return uffd;
}

class Handler {
 public:
  Handler(int uffd, std::vector<Mapping> mappings, const std::uint8_t* image)
      : uffd_(uffd), mappings_(std::move(mappings)), image_(image) {}

  void Handle(const uffd_msg& event) {
    if (event.event == UFFD_EVENT_REMOVE) {
      for (std::uint64_t page = event.arg.remove.start; page < event.arg.remove.end;
           page += kPageBytes) {
        removed_.insert(page);
      }
    } else if (event.event == UFFD_EVENT_PAGEFAULT) {
      Serve(event.arg.pagefault.address & ~(kPageBytes - 1));
    }
  }

  std::uint64_t served() const { return served_; }

 private:
  void Serve(std::uint64_t page) {
    for (const Mapping& mapping : mappings_) {
      if (page < mapping.host || page - mapping.host >= mapping.size) continue;
      if (removed_.count(page) != 0) {
        uffdio_zeropage zero{};
        zero.range = {page, kPageBytes};
        if (ioctl(uffd_, UFFDIO_ZEROPAGE, &zero) != 0 && errno != EEXIST) Die("UFFDIO_ZEROPAGE");
      } else {
        uffdio_copy copy{};
        copy.dst = page;
        copy.src = reinterpret_cast<std::uint64_t>(image_ + mapping.offset + (page - mapping.host));
        copy.len = kPageBytes;
        if (ioctl(uffd_, UFFDIO_COPY, &copy) != 0 && errno != EEXIST) Die("UFFDIO_COPY");
      }
      ++served_;
      return;
    }
    Die("a fault outside the mappings");
  }

  int uffd_;
  std::vector<Mapping> mappings_;
  const std::uint8_t* image_;
  std::set<std::uint64_t> removed_;
  std::uint64_t served_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int listener = Listen(argv[1]);
  std::printf("listening\n");
  std::fflush(stdout);
  const int file = open(argv[2], O_RDONLY | O_CLOEXEC);
  struct stat info {};
  if (file < 0 || fstat(file, &info) != 0) Die("the memory file");
  void* image =
      mmap(nullptr, static_cast<std::size_t>(info.st_size), PROT_READ, MAP_PRIVATE, file, 0);
  if (image == MAP_FAILED) Die("mmap");
  const int peer = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  std::string text;
  const int uffd = Receive(peer, text);
  Handler handler(uffd, Parse(text), static_cast<const std::uint8_t*>(image));
  for (;;) {
    pollfd fds[2] = {{uffd, POLLIN, 0}, {peer, POLLIN, 0}};
    if (poll(fds, 2, -1) < 0) continue;
    uffd_msg event{};
    if ((fds[0].revents & POLLIN) != 0 && read(uffd, &event, sizeof event) == sizeof event) {
      handler.Handle(event);
      continue;
    }
    if ((fds[1].revents & (POLLIN | POLLHUP)) != 0) break;
  }
  std::printf("served %llu\n", static_cast<unsigned long long>(handler.served()));
  return 0;
}
