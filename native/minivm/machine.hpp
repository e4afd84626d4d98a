// One virtual machine: guest RAM, the device window, the backend that runs the guest, dirty sets
// and epochs. Every method is called from one thread (the VMM's API thread); none throws.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "minivm/backend.hpp"
#include "minivm/guest_memory.hpp"

namespace minivm {

enum class BackendKind { kKvm, kThread };

struct MachineOptions {
  std::vector<RegionSpec> regions;
  BackendKind backend = BackendKind::kThread;
  bool track = false;
  bool huge = false;
  Backing backing = Backing::kAnonymous;
  std::string memory_path;  // the memory file for kFile, the handler's socket for kUffd
  std::vector<std::uint8_t> saved_vcpu;    // from SaveVcpu, or empty
  std::vector<std::uint8_t> saved_window;  // from SaveWindow, or empty
};

// What the guest shall do. Page indexes are image pages.
struct Program {
  Command command = kIdle;
  bool use_list = false;
  std::vector<std::uint64_t> list;
  std::uint64_t first = 0;
  std::uint64_t count = 0;
  std::uint32_t words = 1024;
  std::uint32_t value = 0;
  bool loop = false;
  std::uint64_t pages_per_second = 0;
};

struct ProgramPlaced {
  std::uint64_t guest_pages = 0;
  std::uint64_t device_pages = 0;  // beyond the guest's reach: written once, by the VMM
};

struct Counters {
  std::uint64_t counter = 0;
  std::uint64_t max_gap_ns = 0;
  std::uint64_t pages_total = 0;
  std::uint32_t passes = 0;
  std::uint32_t read_sum = 0;
  bool idle = true;
};

enum class EpochAction { kBegin, kCommit, kAbort };

class Machine {
 public:
  Machine() = default;
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  // Ends paused. For kUffd, hands the userfaultfd to the handler before the guest can touch memory.
  Failure Create(const MachineOptions& options);

  void Pause();
  void Resume();
  bool paused() const { return paused_; }
  bool track() const { return shared_.track; }
  const char* backend_name() const { return backend_->name(); }
  std::string crash() const { return backend_->Crash(); }
  GuestMemory& memory() { return shared_.memory; }

  Failure SetProgram(const Program& program, ProgramPlaced& placed);
  Counters ReadCounters();
  void ResetGap();

  // Device access, in the image's offsets; may cross regions.
  Failure DeviceWrite(std::uint64_t image_offset, const std::uint8_t* data, std::uint64_t bytes);
  Failure ReadBytes(std::uint64_t image_offset, std::uint8_t* out, std::uint64_t bytes);
  // One 64-bit hash per page; the hash of a page does not depend on where it is.
  Failure HashPages(std::uint64_t first_page, std::uint64_t count, std::uint64_t* out);

  Failure Remove(std::uint64_t first_page, std::uint64_t count, bool mark_dirty);
  Failure SetReadable(std::uint64_t page, bool readable);
  Failure AddRegion(const RegionSpec& spec);
  Failure DropRegion();

  // The dirty set: the open epoch's if there is one, else everything since the last reset. Without
  // tracking, the resident pages. `kvm_only` and `vmm_only` are the current epoch's two sources.
  enum class Set { kDirty, kRemoved, kResident, kZeroResident, kGuestLog, kVmmLog };
  Failure Collect(Set set, std::vector<Bitmap>& out);
  Failure ResetDirty();
  Failure Epoch(EpochAction action);
  std::uint64_t epoch_number() const { return epoch_; }
  bool epoch_open() const { return epoch_open_; }

  Failure SaveVcpu(std::vector<std::uint8_t>& out);
  void SaveWindow(std::vector<std::uint8_t>& out);

 private:
  class Quiet;  // parks the vCPU for a scope, if it runs
  Failure MapWindow(const std::vector<std::uint8_t>& saved);
  Failure SyncDirty();
  void ParkNow();
  void UnparkNow();
  template <typename Piece>
  Failure ForEachPiece(std::uint64_t image_offset, std::uint64_t bytes, Piece piece);
  Failure PlaceList(const Program& program, std::uint64_t count, ProgramPlaced& placed);
  bool PlaceRange(const Program& program, ProgramPlaced& placed);
  Failure WriteDevicePage(std::uint64_t image_page, const Program& program);

  Shared shared_;
  std::unique_ptr<Backend> backend_;
  int uffd_ = -1;
  int uffd_socket_ = -1;  // kept open: its end tells the handler that this VM is gone
  bool paused_ = true;
  bool epoch_open_ = false;
  std::uint64_t epoch_ = 0;
  bool huge_ = false;
};

}  // namespace minivm
