// Firecracker's userfaultfd handshake: register guest memory, then send the descriptor and the
// mappings to the page-fault handler's socket.
#pragma once

#include <string>

#include "minivm/guest_memory.hpp"

namespace minivm {

struct UffdLink {
  int uffd = -1;
  int socket = -1;
};

Failure ConnectUffd(const GuestMemory& memory, const std::string& socket_path, UffdLink& link);

}  // namespace minivm
