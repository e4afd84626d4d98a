#include "minivm/machine.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "minivm/uffd.hpp"

namespace minivm {
namespace {

// A saved window: the mailbox, the pace in pages per second (u64), then the list if one is in use.
constexpr std::size_t kSavedHead = sizeof(Mailbox) + 8;

void FillPool(std::uint8_t* pool) {
  std::uint64_t state = 0x9e3779b97f4a7c15ULL;
  for (std::uint64_t i = 0; i < kPoolBytes; i += 8) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(pool + i, &state, 8);
  }
}

std::uint64_t HashPage(const std::uint8_t* page) {
  std::uint64_t lanes[4] = {0x9e3779b97f4a7c15ULL, 0xc2b2ae3d27d4eb4fULL, 0x165667b19e3779f9ULL,
                            0x27d4eb2f165667c5ULL};
  for (std::uint64_t i = 0; i < kPageBytes; i += 32) {
    for (std::size_t lane = 0; lane < 4; ++lane) {
      std::uint64_t word = 0;
      std::memcpy(&word, page + i + lane * 8, 8);
      lanes[lane] = (lanes[lane] ^ word) * 0xff51afd7ed558ccdULL;
      lanes[lane] ^= lanes[lane] >> 29;
    }
  }
  std::uint64_t hash = 0;
  for (const std::uint64_t lane : lanes) {
    hash = (hash ^ lane) * 0xc4ceb9fe1a85ec53ULL;
    hash ^= hash >> 33;
  }
  return hash;
}

}  // namespace

// Parks a running vCPU for a scope, so that the API thread may change what the guest uses.
class Machine::Quiet {
 public:
  explicit Quiet(Machine& machine) : machine_(machine) {
    if (!machine_.paused_) machine_.ParkNow();
  }
  ~Quiet() {
    if (!machine_.paused_) machine_.UnparkNow();
  }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  Machine& machine_;
};

Machine::~Machine() {
  // A vCPU that waits for a page can't be parked before the uffd is gone.
  if (uffd_ >= 0) close(uffd_);
  if (uffd_socket_ >= 0) close(uffd_socket_);
  if (backend_) backend_->Park();
  backend_.reset();
  if (shared_.window != nullptr) munmap(shared_.window, kWindowBytes);
}

Failure Machine::MapWindow(const std::vector<std::uint8_t>& saved) {
  void* window = mmap(nullptr, kWindowBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (window == MAP_FAILED) return FailErrno("Cannot map the device window", errno);
  shared_.window = static_cast<std::uint8_t*>(window);
  FillPool(shared_.window + kPoolOffset);
  if (saved.empty()) return std::nullopt;
  if (saved.size() < kSavedHead) return "The saved device window is too short";
  Mailbox& box = shared_.mailbox();
  std::memcpy(&box, saved.data(), sizeof box);
  std::memcpy(&shared_.pace.pages_per_second, saved.data() + sizeof box, 8);
  const std::uint64_t list_bytes = saved.size() - kSavedHead;
  const bool needs_list = box.command != kIdle && (box.flags & kFlagList) != 0;
  if (box.count > kListCapacity && needs_list) return "The saved device window has too long a list";
  if (list_bytes != (needs_list ? box.count * 4ULL : 0))
    return "The saved device window is damaged";
  if (box.command > kRead || box.words > 1024 || (box.command != kIdle && box.index >= box.count)) {
    return "The saved device window is damaged";
  }
  std::memcpy(shared_.list(), saved.data() + kSavedHead, list_bytes);
  box.last_clock = 0;  // the clock of another host or boot: no gap across a restore
  box.max_gap = 0;
  return std::nullopt;
}

Failure Machine::Create(const MachineOptions& options) {
  shared_.track = options.track;
  huge_ = options.huge;
  if (Failure failure = MapWindow(options.saved_window)) return failure;
  if (Failure failure =
          shared_.memory.Map(options.regions, options.backing, options.memory_path, huge_)) {
    return failure;
  }
  if (options.backing == Backing::kUffd) {
    UffdLink link;
    Failure failure = ConnectUffd(shared_.memory, options.memory_path, link);
    uffd_ = link.uffd;
    uffd_socket_ = link.socket;
    if (failure) return failure;
  }
  backend_ =
      options.backend == BackendKind::kKvm ? MakeKvmBackend(shared_) : MakeThreadBackend(shared_);
  Failure failure = backend_->Create(options.saved_vcpu);
  if (failure) {
    backend_.reset();
    return failure;
  }
  return std::nullopt;
}

void Machine::ParkNow() { backend_->Park(); }

void Machine::UnparkNow() {
  shared_.pace.base_ns = MonotonicNs();
  shared_.pace.base_granted = shared_.mailbox().granted;
  backend_->Unpark();
}

void Machine::Pause() {
  if (paused_) return;
  ParkNow();
  paused_ = true;
}

void Machine::Resume() {
  if (!paused_) return;
  paused_ = false;
  UnparkNow();
}

Failure Machine::WriteDevicePage(std::uint64_t image_page, const Program& program) {
  Region* region = shared_.memory.FindByImage(image_page * kPageBytes);
  if (region == nullptr) return "Page " + std::to_string(image_page) + " is outside the image";
  const std::uint64_t page = image_page - region->image_offset / kPageBytes;
  if (TestBit(region->unreadable, page)) return std::nullopt;
  std::uint8_t* host = region->host + page * kPageBytes;
  if (program.command == kRead) {
    // SAFETY: page-aligned guest memory; volatile so that the read really happens.
    static_cast<void>(*reinterpret_cast<const volatile std::uint32_t*>(host));
    return std::nullopt;
  }
  WritePatternPage(shared_, host,
                   static_cast<std::uint32_t>(region->guest_address / kPageBytes + page));
  if (shared_.track) SetBit(region->vmm, page);
  ClearBit(region->removed, page);
  return std::nullopt;
}

Failure Machine::PlaceList(const Program& program, std::uint64_t count, ProgramPlaced& placed) {
  const std::uint64_t image_pages = shared_.memory.image_bytes() / kPageBytes;
  std::uint32_t listed = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t page = program.use_list ? program.list[i] : program.first + i;
    if (page >= image_pages) return "Page " + std::to_string(page) + " is outside the image";
    const Region& region = *shared_.memory.FindByImage(page * kPageBytes);
    const std::uint64_t pfn = (region.guest_address - region.image_offset) / kPageBytes + page;
    if (!backend_->CanReach(pfn)) {
      if (Failure failure = WriteDevicePage(page, program)) return failure;
      ++placed.device_pages;
    } else if (listed == kListCapacity) {
      return "A list holds at most " + std::to_string(kListCapacity) + " pages";
    } else {
      shared_.list()[listed++] = static_cast<std::uint32_t>(pfn);
    }
  }
  Mailbox& box = shared_.mailbox();
  box.flags |= kFlagList;
  box.count = listed;
  placed.guest_pages = listed;
  return std::nullopt;
}

// Whether a range lies in one region that the guest reaches, so that it needs no list.
bool Machine::PlaceRange(const Program& program, ProgramPlaced& placed) {
  if (program.use_list || program.count > UINT32_MAX) return false;
  const Region& region = *shared_.memory.FindByImage(program.first * kPageBytes);
  const std::uint64_t end = (program.first + program.count) * kPageBytes;
  if (end > region.image_offset + region.bytes) return false;
  if (!backend_->CanReach((region.guest_address + region.bytes) / kPageBytes - 1)) return false;
  Mailbox& box = shared_.mailbox();
  box.first = static_cast<std::uint32_t>((region.guest_address - region.image_offset) / kPageBytes +
                                         program.first);
  box.count = static_cast<std::uint32_t>(program.count);
  placed.guest_pages = program.count;
  return true;
}

Failure Machine::SetProgram(const Program& program, ProgramPlaced& placed) {
  const Quiet quiet(*this);
  Mailbox& box = shared_.mailbox();
  box.command = kIdle;
  if (program.command == kIdle) return std::nullopt;
  const std::uint64_t count = program.use_list ? program.list.size() : program.count;
  const std::uint64_t image_pages = shared_.memory.image_bytes() / kPageBytes;
  if (count == 0) return "A program needs at least one page";
  if (!program.use_list && (program.first >= image_pages || count > image_pages - program.first)) {
    return "The program's range is outside the image";
  }
  box.flags = program.loop ? kFlagLoop : Flags{};
  box.words = program.words;
  box.value = program.value;
  box.index = 0;
  box.generation = 0;
  box.read_sum = 0;
  // Set first, with the guest parked: what the VMM writes on its behalf depends on the command.
  box.command = program.command;
  Failure failure;
  if (!PlaceRange(program, placed)) failure = PlaceList(program, count, placed);
  if (failure || placed.guest_pages == 0) {
    box.command = kIdle;
    box.generation = 1;
    return failure;
  }
  if (program.pages_per_second > 0) box.flags |= kFlagPaced;
  box.spent = box.granted;
  shared_.pace.pages_per_second = program.pages_per_second;
  return std::nullopt;
}

Counters Machine::ReadCounters() {
  const Mailbox& box = shared_.mailbox();
  Counters counters;
  counters.counter = __atomic_load_n(&box.counter, __ATOMIC_RELAXED);
  const std::uint64_t gap = __atomic_load_n(&box.max_gap, __ATOMIC_RELAXED);
  counters.max_gap_ns = static_cast<std::uint64_t>(static_cast<double>(gap) * 1e9 /
                                                   static_cast<double>(backend_->clock_hz()));
  counters.pages_total = __atomic_load_n(&box.pages_total, __ATOMIC_RELAXED);
  counters.passes = __atomic_load_n(&box.generation, __ATOMIC_RELAXED);
  counters.idle = __atomic_load_n(&box.command, __ATOMIC_ACQUIRE) == kIdle;
  counters.read_sum = __atomic_load_n(&box.read_sum, __ATOMIC_RELAXED);
  return counters;
}

void Machine::ResetGap() {
  Mailbox& box = shared_.mailbox();
  const Quiet quiet(*this);
  box.max_gap = 0;
  box.last_clock = 0;
}

template <typename Piece>
Failure Machine::ForEachPiece(std::uint64_t image_offset, std::uint64_t bytes, Piece piece) {
  const std::uint64_t image = shared_.memory.image_bytes();
  if (image_offset > image || bytes > image - image_offset) return "The range is outside the image";
  while (bytes > 0) {
    Region& region = *shared_.memory.FindByImage(image_offset);
    const std::uint64_t at = image_offset - region.image_offset;
    const std::uint64_t length = std::min(bytes, region.bytes - at);
    if (Failure failure = piece(region, at, length)) return failure;
    image_offset += length;
    bytes -= length;
  }
  return std::nullopt;
}

namespace {

Failure RefuseUnreadable(const Region& region, std::uint64_t at, std::uint64_t length) {
  for (std::uint64_t page = at / kPageBytes; page <= (at + length - 1) / kPageBytes; ++page) {
    if (TestBit(region.unreadable, page)) {
      return "Page " + std::to_string(region.image_offset / kPageBytes + page) +
             " was made unreadable";
    }
  }
  return std::nullopt;
}

}  // namespace

Failure Machine::DeviceWrite(std::uint64_t image_offset, const std::uint8_t* data,
                             std::uint64_t bytes) {
  return ForEachPiece(image_offset, bytes,
                      [&](Region& region, std::uint64_t at, std::uint64_t length) -> Failure {
                        if (Failure failure = RefuseUnreadable(region, at, length)) return failure;
                        std::memcpy(region.host + at, data, length);
                        data += length;
                        const std::uint64_t last = (at + length - 1) / kPageBytes;
                        for (std::uint64_t page = at / kPageBytes; page <= last; ++page) {
                          if (shared_.track) SetBit(region.vmm, page);
                          ClearBit(region.removed, page);
                        }
                        return std::nullopt;
                      });
}

Failure Machine::ReadBytes(std::uint64_t image_offset, std::uint8_t* out, std::uint64_t bytes) {
  return ForEachPiece(image_offset, bytes,
                      [&](Region& region, std::uint64_t at, std::uint64_t length) -> Failure {
                        if (Failure failure = RefuseUnreadable(region, at, length)) return failure;
                        std::memcpy(out, region.host + at, length);
                        out += length;
                        return std::nullopt;
                      });
}

Failure Machine::HashPages(std::uint64_t first_page, std::uint64_t count, std::uint64_t* out) {
  return ForEachPiece(first_page * kPageBytes, count * kPageBytes,
                      [&](Region& region, std::uint64_t at, std::uint64_t length) -> Failure {
                        if (Failure failure = RefuseUnreadable(region, at, length)) return failure;
                        for (std::uint64_t i = 0; i < length; i += kPageBytes) {
                          *out++ = HashPage(region.host + at + i);
                        }
                        return std::nullopt;
                      });
}

Failure Machine::Remove(std::uint64_t first_page, std::uint64_t count, bool mark_dirty) {
  const Quiet quiet(*this);
  // What the guest wrote before now must not look like a write after the removal.
  if (Failure failure = SyncDirty()) return failure;
  return ForEachPiece(first_page * kPageBytes, count * kPageBytes,
                      [&](Region& region, std::uint64_t at, std::uint64_t length) -> Failure {
                        const std::uint64_t first = at / kPageBytes;
                        const std::uint64_t pages = length / kPageBytes;
                        if (Failure failure = shared_.memory.Remove(region, first, pages))
                          return failure;
                        for (std::uint64_t page = first; mark_dirty && page < first + pages;
                             ++page) {
                          if (shared_.track) SetBit(region.vmm, page);
                        }
                        return std::nullopt;
                      });
}

Failure Machine::SetReadable(std::uint64_t page, bool readable) {
  const Quiet quiet(*this);
  Region* region = shared_.memory.FindByImage(page * kPageBytes);
  if (region == nullptr) return "Page " + std::to_string(page) + " is outside the image";
  return shared_.memory.SetReadable(*region, page - region->image_offset / kPageBytes, readable);
}

Failure Machine::AddRegion(const RegionSpec& spec) {
  const Quiet quiet(*this);
  if (Failure failure = shared_.memory.AddRegion(spec, Backing::kAnonymous, -1, huge_))
    return failure;
  Failure failure = backend_->AddRegion(*shared_.memory.regions().back());
  if (failure) shared_.memory.DropLastRegion();
  return failure;
}

Failure Machine::DropRegion() {
  const Quiet quiet(*this);
  if (shared_.memory.regions().size() < 2) return "The last region has to stay";
  if (Failure failure = backend_->DropRegion(*shared_.memory.regions().back())) return failure;
  shared_.memory.DropLastRegion();
  return std::nullopt;
}

Failure Machine::SyncDirty() {
  if (!shared_.track) return std::nullopt;
  for (const auto& region : shared_.memory.regions()) {
    Bitmap fresh;
    if (Failure failure = backend_->FetchLog(*region, fresh)) return failure;
    OrInto(region->dirty, fresh);
    AndNotInto(region->removed, fresh);
  }
  return std::nullopt;
}

Failure Machine::Collect(Set set, std::vector<Bitmap>& out) {
  const Quiet quiet(*this);
  if (Failure failure = SyncDirty()) return failure;
  out.clear();
  for (const auto& region : shared_.memory.regions()) {
    Bitmap bits;
    const bool resident = set == Set::kResident || set == Set::kZeroResident ||
                          (set == Set::kDirty && !shared_.track);
    if (resident) {
      if (Failure failure = shared_.memory.Resident(*region, bits)) return failure;
      if (set == Set::kZeroResident) {
        const Bitmap in = bits;
        GuestMemory::ZeroPagesOf(*region, in, bits);
      }
    } else if (set == Set::kDirty) {
      bits = epoch_open_ ? region->frozen_dirty : region->dirty;
      if (!epoch_open_) OrInto(bits, region->vmm);
    } else if (set == Set::kRemoved) {
      bits = epoch_open_ ? region->frozen_removed : region->removed;
    } else {
      bits = set == Set::kGuestLog ? region->dirty : region->vmm;
    }
    out.push_back(std::move(bits));
  }
  return std::nullopt;
}

Failure Machine::ResetDirty() {
  const Quiet quiet(*this);
  if (Failure failure = SyncDirty()) return failure;
  for (const auto& region : shared_.memory.regions()) {
    ClearAll(region->dirty);
    ClearAll(region->vmm);
  }
  return std::nullopt;
}

Failure Machine::Epoch(EpochAction action) {
  if (!shared_.track) return "Dirty epochs need track_dirty_pages";
  if (action == EpochAction::kBegin && epoch_open_) return "A dirty epoch is already open";
  if (action != EpochAction::kBegin && !epoch_open_) return "No dirty epoch is open";
  const Quiet quiet(*this);
  if (Failure failure = SyncDirty()) return failure;
  for (const auto& region : shared_.memory.regions()) {
    if (action == EpochAction::kBegin) {
      region->frozen_dirty = region->dirty;
      OrInto(region->frozen_dirty, region->vmm);
      region->frozen_removed = region->removed;
      ClearAll(region->dirty);
      ClearAll(region->vmm);
      ClearAll(region->removed);
      continue;
    }
    if (action == EpochAction::kAbort) {
      // A page removed in the open epoch and written since is a dirty page, not a removed one.
      AndNotInto(region->frozen_removed, region->dirty);
      AndNotInto(region->frozen_removed, region->vmm);
      OrInto(region->removed, region->frozen_removed);
      OrInto(region->dirty, region->frozen_dirty);
    }
    ClearAll(region->frozen_dirty);
    ClearAll(region->frozen_removed);
  }
  epoch_open_ = action == EpochAction::kBegin;
  if (action == EpochAction::kCommit) ++epoch_;
  return std::nullopt;
}

Failure Machine::SaveVcpu(std::vector<std::uint8_t>& out) { return backend_->SaveVcpu(out); }

void Machine::SaveWindow(std::vector<std::uint8_t>& out) {
  const Mailbox& box = shared_.mailbox();
  const bool needs_list = box.command != kIdle && (box.flags & kFlagList) != 0;
  out.resize(kSavedHead + (needs_list ? box.count * 4ULL : 0));
  std::memcpy(out.data(), &box, sizeof box);
  std::memcpy(out.data() + sizeof box, &shared_.pace.pages_per_second, 8);
  if (needs_list) std::memcpy(out.data() + kSavedHead, shared_.list(), box.count * 4ULL);
}

std::string ProbeKvm() {
  Machine machine;
  MachineOptions options;
  options.regions = {{0, 16 * kPageBytes}};
  options.backend = BackendKind::kKvm;
  if (Failure failure = machine.Create(options)) return *failure;
  machine.Resume();
  const std::uint64_t deadline = MonotonicNs() + 1000000000ULL;
  while (machine.ReadCounters().counter < 2 && machine.crash().empty()) {
    if (MonotonicNs() > deadline) return "the probe vCPU did not run within a second";
    timespec nap{0, 200000};
    nanosleep(&nap, nullptr);
  }
  machine.Pause();
  return machine.crash();
}

}  // namespace minivm
