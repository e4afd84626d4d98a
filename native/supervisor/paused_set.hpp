// What the daemon says over the pipe, as lines:
//   paused <key> <pid> <start ticks> <socket path>   before it sends a pause
//   resumed <key>                                    after the resume was answered
// and the VMs that are paused by it according to them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "supervisor/vm_api.hpp"

namespace varve::supervisor {

class PausedSet {
 public:
  // Takes bytes as they come. False: a line was malformed or too long; it is skipped.
  bool Feed(std::string_view bytes);
  const std::vector<PausedVm>& vms() const { return vms_; }

 private:
  bool TakeLine(std::string_view line);

  std::string partial_;
  std::vector<PausedVm> vms_;
};

}  // namespace varve::supervisor
