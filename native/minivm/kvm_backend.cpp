// The guest as a KVM vCPU: flat 32-bit protected mode, no paging, no interrupt controller.
#include <fcntl.h>
#include <linux/kvm.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <mutex>
#include <thread>

#include "minivm/backend.hpp"
#include "minivm/guest_program.hpp"

namespace minivm {
namespace {

constexpr int kKickSignal = SIGUSR2;
constexpr std::uint32_t kWindowSlot = 500;
// Three pages for the TSS and one for an identity map: needed on Intel to run without paging.
constexpr std::uint64_t kTssAddress = 0xFFFBD000ULL;
constexpr std::uint64_t kIdentityMapAddress = 0xFFFBC000ULL;
constexpr std::uint64_t kReachablePages = 1ULL << 20;  // 32-bit addresses without paging
constexpr std::chrono::microseconds kIdleTick{1000};
constexpr std::uint32_t kSavedMagic = 0x4d56434b;

// kvm_cpuid2 by hand: the header's flexible array has another size and place in C++ than in C, and
// the ioctl's number contains that size.
constexpr std::uint32_t kCpuidEntriesMax = 256;
struct CpuidList {
  std::uint32_t count;
  std::uint32_t padding;
  kvm_cpuid_entry2 entries[kCpuidEntriesMax];
};
constexpr unsigned long kGetSupportedCpuid = _IOC(_IOC_READ | _IOC_WRITE, KVMIO, 0x05, 8);
constexpr unsigned long kSetCpuid2 = _IOC(_IOC_WRITE, KVMIO, 0x90, 8);

struct SavedVcpu {
  std::uint32_t magic;
  std::uint32_t bytes;
  kvm_regs regs;
  kvm_sregs sregs;
  kvm_fpu fpu;
  kvm_vcpu_events events;
};

class Fd {
 public:
  Fd() = default;
  ~Fd() { reset(-1); }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  int get() const { return fd_; }
  void reset(int fd) {
    if (fd_ >= 0) close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

class KvmBackend final : public Backend {
 public:
  explicit KvmBackend(Shared& shared) : shared_(shared) {}
  ~KvmBackend() override;

  const char* name() const override { return "kvm"; }
  Failure Create(const std::vector<std::uint8_t>& saved) override;
  void Park() override;
  void Unpark() override;
  Failure AddRegion(Region& region) override { return SetSlot(region, region.bytes); }
  Failure DropRegion(Region& region) override { return SetSlot(region, 0); }
  Failure FetchLog(Region& region, Bitmap& fresh) override;
  Failure SaveVcpu(std::vector<std::uint8_t>& out) override;
  std::uint64_t clock_hz() const override { return tsc_hz_; }
  bool CanReach(std::uint64_t pfn) const override { return pfn < kReachablePages; }
  std::string Crash() const override {
    const std::lock_guard lock(mutex_);
    return crash_;
  }

 private:
  Failure SetSlot(Region& region, std::uint64_t bytes);
  Failure CreateVm();
  Failure SetCpuid();
  Failure SetFreshState();
  Failure Restore(const std::vector<std::uint8_t>& saved);
  void Run();
  // One KVM_RUN; false when the vCPU has to wait (idle, or stopped for good).
  bool RunOnce();

  Shared& shared_;
  Fd kvm_;
  Fd vm_;
  Fd vcpu_;
  kvm_run* run_ = nullptr;
  std::size_t run_bytes_ = 0;
  std::uint64_t tsc_hz_ = 1000000000ULL;

  std::thread thread_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool want_parked_ = true;
  bool parked_ = false;
  bool stop_ = false;
  std::string crash_;
};

KvmBackend::~KvmBackend() {
  if (thread_.joinable()) {
    Park();
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  if (run_ != nullptr) munmap(run_, run_bytes_);
}

Failure KvmBackend::SetSlot(Region& region, std::uint64_t bytes) {
  kvm_userspace_memory_region slot{};
  slot.slot = region.slot;
  slot.flags = shared_.track ? KVM_MEM_LOG_DIRTY_PAGES : 0;
  slot.guest_phys_addr = region.guest_address;
  slot.memory_size = bytes;
  // SAFETY: the region stays mapped until DropRegion has removed the slot.
  slot.userspace_addr = reinterpret_cast<std::uint64_t>(region.host);
  if (ioctl(vm_.get(), KVM_SET_USER_MEMORY_REGION, &slot) != 0) {
    return FailErrno("KVM_SET_USER_MEMORY_REGION", errno);
  }
  return std::nullopt;
}

Failure KvmBackend::CreateVm() {
  kvm_.reset(open("/dev/kvm", O_RDWR | O_CLOEXEC));
  if (kvm_.get() < 0) return FailErrno("Cannot open /dev/kvm", errno);
  if (ioctl(kvm_.get(), KVM_GET_API_VERSION, 0) != KVM_API_VERSION)
    return "KVM has another API version";
  vm_.reset(ioctl(kvm_.get(), KVM_CREATE_VM, 0));
  if (vm_.get() < 0) return FailErrno("KVM_CREATE_VM", errno);
  std::uint64_t identity = kIdentityMapAddress;
  if (ioctl(vm_.get(), KVM_SET_IDENTITY_MAP_ADDR, &identity) != 0) {
    return FailErrno("KVM_SET_IDENTITY_MAP_ADDR", errno);
  }
  if (ioctl(vm_.get(), KVM_SET_TSS_ADDR, kTssAddress) != 0)
    return FailErrno("KVM_SET_TSS_ADDR", errno);
  for (const auto& region : shared_.memory.regions()) {
    if (Failure failure = SetSlot(*region, region->bytes)) return failure;
  }
  kvm_userspace_memory_region window{};
  window.slot = kWindowSlot;
  window.guest_phys_addr = kWindowAddress;
  window.memory_size = kWindowBytes;
  // SAFETY: the window is mapped for the life of the Machine, which outlives its backend.
  window.userspace_addr = reinterpret_cast<std::uint64_t>(shared_.window);
  if (ioctl(vm_.get(), KVM_SET_USER_MEMORY_REGION, &window) != 0) {
    return FailErrno("KVM_SET_USER_MEMORY_REGION (device window)", errno);
  }
  vcpu_.reset(ioctl(vm_.get(), KVM_CREATE_VCPU, 0));
  if (vcpu_.get() < 0) return FailErrno("KVM_CREATE_VCPU", errno);
  const int bytes = ioctl(kvm_.get(), KVM_GET_VCPU_MMAP_SIZE, 0);
  if (bytes < 0) return FailErrno("KVM_GET_VCPU_MMAP_SIZE", errno);
  run_bytes_ = static_cast<std::size_t>(bytes);
  void* run = mmap(nullptr, run_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, vcpu_.get(), 0);
  if (run == MAP_FAILED) return FailErrno("Cannot map the vCPU", errno);
  run_ = static_cast<kvm_run*>(run);
  const int khz = ioctl(vcpu_.get(), KVM_GET_TSC_KHZ, 0);
  if (khz > 0) tsc_hz_ = static_cast<std::uint64_t>(khz) * 1000;
  return std::nullopt;
}

Failure KvmBackend::SetCpuid() {
  const auto cpuid = std::make_unique<CpuidList>();
  cpuid->count = kCpuidEntriesMax;
  if (ioctl(kvm_.get(), kGetSupportedCpuid, cpuid.get()) != 0) {
    return FailErrno("KVM_GET_SUPPORTED_CPUID", errno);
  }
  if (ioctl(vcpu_.get(), kSetCpuid2, cpuid.get()) != 0) return FailErrno("KVM_SET_CPUID2", errno);
  return std::nullopt;
}

Failure KvmBackend::SetFreshState() {
  kvm_sregs sregs{};
  if (ioctl(vcpu_.get(), KVM_GET_SREGS, &sregs) != 0) return FailErrno("KVM_GET_SREGS", errno);
  kvm_segment flat{};
  flat.limit = 0xffffffff;
  flat.present = 1;
  flat.s = 1;
  flat.db = 1;
  flat.g = 1;
  flat.type = 0x3;  // data, writable, accessed
  flat.selector = 0x10;
  sregs.ds = sregs.es = sregs.fs = sregs.gs = sregs.ss = flat;
  flat.type = 0xb;  // code, readable, accessed
  flat.selector = 0x08;
  sregs.cs = flat;
  sregs.cr0 = 0x31;  // protection, extension type, numeric errors; no paging, caches on
  sregs.cr4 = 0;
  sregs.efer = 0;
  if (ioctl(vcpu_.get(), KVM_SET_SREGS, &sregs) != 0) return FailErrno("KVM_SET_SREGS", errno);
  kvm_regs regs{};
  regs.rip = kWindowAddress + kCodeOffset;
  regs.rbp = kWindowAddress + kMailboxOffset;
  regs.rflags = 2;
  if (ioctl(vcpu_.get(), KVM_SET_REGS, &regs) != 0) return FailErrno("KVM_SET_REGS", errno);
  return std::nullopt;
}

Failure KvmBackend::Restore(const std::vector<std::uint8_t>& saved) {
  SavedVcpu state{};
  if (saved.size() != sizeof state) return "The saved vCPU does not fit a KVM guest";
  std::memcpy(&state, saved.data(), sizeof state);
  if (state.magic != kSavedMagic || state.bytes != sizeof state) return "The saved vCPU is damaged";
  if (ioctl(vcpu_.get(), KVM_SET_SREGS, &state.sregs) != 0)
    return FailErrno("KVM_SET_SREGS", errno);
  if (ioctl(vcpu_.get(), KVM_SET_REGS, &state.regs) != 0) return FailErrno("KVM_SET_REGS", errno);
  if (ioctl(vcpu_.get(), KVM_SET_FPU, &state.fpu) != 0) return FailErrno("KVM_SET_FPU", errno);
  if (ioctl(vcpu_.get(), KVM_SET_VCPU_EVENTS, &state.events) != 0) {
    return FailErrno("KVM_SET_VCPU_EVENTS", errno);
  }
  return std::nullopt;
}

Failure KvmBackend::Create(const std::vector<std::uint8_t>& saved) {
  std::memcpy(shared_.window + kCodeOffset, kGuestProgram, kGuestProgramBytes);
  if (Failure failure = CreateVm()) return failure;
  if (Failure failure = SetCpuid()) return failure;
  if (Failure failure = saved.empty() ? SetFreshState() : Restore(saved)) return failure;
  struct sigaction action {};
  action.sa_handler = [](int) {};  // only there to end KVM_RUN with EINTR
  sigaction(kKickSignal, &action, nullptr);
  thread_ = std::thread([this] { Run(); });
  return std::nullopt;
}

void KvmBackend::Park() {
  std::unique_lock lock(mutex_);
  want_parked_ = true;
  __atomic_store_n(&run_->immediate_exit, 1, __ATOMIC_SEQ_CST);
  changed_.notify_all();
  if (!parked_) pthread_kill(thread_.native_handle(), kKickSignal);
  changed_.wait(lock, [this] { return parked_; });
}

void KvmBackend::Unpark() {
  const std::lock_guard lock(mutex_);
  want_parked_ = false;
  __atomic_store_n(&run_->immediate_exit, 0, __ATOMIC_SEQ_CST);
  changed_.notify_all();
}

void KvmBackend::Run() {
  pthread_setname_np(pthread_self(), "fc_vcpu 0");
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (want_parked_ || !crash_.empty()) {
      parked_ = true;
      changed_.notify_all();
      changed_.wait(lock, [this] { return stop_ || (!want_parked_ && crash_.empty()); });
      parked_ = false;
      continue;
    }
    lock.unlock();
    const bool ran = RunOnce();
    lock.lock();
    if (!ran && !want_parked_ && !stop_ && crash_.empty()) {
      changed_.wait_for(lock, kIdleTick);
      GrantBudget(shared_);
    }
  }
}

bool KvmBackend::RunOnce() {
  std::string crash;
  if (ioctl(vcpu_.get(), KVM_RUN, 0) != 0) {
    if (errno == EINTR || errno == EAGAIN) return true;
    crash = *FailErrno("KVM_RUN", errno);
  } else if (run_->exit_reason == KVM_EXIT_HLT) {
    return false;
  } else if (run_->exit_reason == KVM_EXIT_INTR) {
    return true;
  } else {
    crash = "the vCPU stopped with exit reason " + std::to_string(run_->exit_reason);
    if (run_->exit_reason == KVM_EXIT_INTERNAL_ERROR) {
      crash += ", suberror " + std::to_string(run_->internal.suberror);
    }
    if (run_->exit_reason == KVM_EXIT_MMIO) {
      crash += ", address " + std::to_string(run_->mmio.phys_addr);
    }
  }
  const std::lock_guard lock(mutex_);
  crash_ = crash;
  return false;
}

Failure KvmBackend::FetchLog(Region& region, Bitmap& fresh) {
  fresh.assign(WordsFor(region.pages), 0);
  if (!shared_.track) return std::nullopt;
  kvm_dirty_log log{};
  log.slot = region.slot;
  log.dirty_bitmap = fresh.data();
  if (ioctl(vm_.get(), KVM_GET_DIRTY_LOG, &log) != 0) return FailErrno("KVM_GET_DIRTY_LOG", errno);
  return std::nullopt;
}

Failure KvmBackend::SaveVcpu(std::vector<std::uint8_t>& out) {
  SavedVcpu state{};
  state.magic = kSavedMagic;
  state.bytes = sizeof state;
  if (ioctl(vcpu_.get(), KVM_GET_REGS, &state.regs) != 0) return FailErrno("KVM_GET_REGS", errno);
  if (ioctl(vcpu_.get(), KVM_GET_SREGS, &state.sregs) != 0)
    return FailErrno("KVM_GET_SREGS", errno);
  if (ioctl(vcpu_.get(), KVM_GET_FPU, &state.fpu) != 0) return FailErrno("KVM_GET_FPU", errno);
  if (ioctl(vcpu_.get(), KVM_GET_VCPU_EVENTS, &state.events) != 0) {
    return FailErrno("KVM_GET_VCPU_EVENTS", errno);
  }
  out.resize(sizeof state);
  std::memcpy(out.data(), &state, sizeof state);
  return std::nullopt;
}

}  // namespace

std::unique_ptr<Backend> MakeKvmBackend(Shared& shared) {
  return std::make_unique<KvmBackend>(shared);
}

}  // namespace minivm
