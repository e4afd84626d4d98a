// The guest as a thread: it runs the same program on the same mailbox, and keeps its own dirty log.
#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "minivm/backend.hpp"

namespace minivm {
namespace {

constexpr std::uint64_t kNsPerSecond = 1000000000ULL;
constexpr std::chrono::microseconds kIdleTick{1000};

class ThreadBackend final : public Backend {
 public:
  explicit ThreadBackend(Shared& shared) : shared_(shared) {}
  ~ThreadBackend() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  const char* name() const override { return "thread"; }

  Failure Create(const std::vector<std::uint8_t>& saved) override {
    if (!saved.empty()) return "The saved vCPU does not fit a thread guest";
    thread_ = std::thread([this] { Run(); });
    return std::nullopt;
  }

  void Park() override {
    std::unique_lock lock(mutex_);
    want_parked_.store(true, std::memory_order_relaxed);
    changed_.notify_all();
    changed_.wait(lock, [this] { return parked_; });
  }

  void Unpark() override {
    const std::lock_guard lock(mutex_);
    want_parked_.store(false, std::memory_order_relaxed);
    changed_.notify_all();
  }

  Failure AddRegion(Region&) override { return std::nullopt; }
  Failure DropRegion(Region&) override { return std::nullopt; }

  Failure FetchLog(Region& region, Bitmap& fresh) override {
    fresh.assign(WordsFor(region.pages), 0);
    for (std::size_t i = 0; i < fresh.size(); ++i) {
      fresh[i] = region.log[i].exchange(0, std::memory_order_relaxed);
    }
    return std::nullopt;
  }

  Failure SaveVcpu(std::vector<std::uint8_t>& out) override {
    out.clear();  // all of this guest's state is in the mailbox
    return std::nullopt;
  }

  std::uint64_t clock_hz() const override { return kNsPerSecond; }
  bool CanReach(std::uint64_t) const override { return true; }

 private:
  void Run() {
    pthread_setname_np(pthread_self(), "fc_vcpu 0");
    std::unique_lock lock(mutex_);
    while (!stop_) {
      if (want_parked_.load(std::memory_order_relaxed)) {
        parked_ = true;
        changed_.notify_all();
        changed_.wait(lock,
                      [this] { return stop_ || !want_parked_.load(std::memory_order_relaxed); });
        parked_ = false;
        continue;
      }
      lock.unlock();
      bool idle = false;
      while (!idle && !want_parked_.load(std::memory_order_relaxed)) idle = !Turn();
      lock.lock();
      if (idle && !stop_ && !want_parked_.load(std::memory_order_relaxed)) {
        changed_.wait_for(lock, kIdleTick);
        GrantBudget(shared_);
      }
    }
  }

  // One turn of the guest's main loop; false when there is nothing to do. Same steps as
  // test/guest.S.
  bool Turn() {
    Mailbox& box = shared_.mailbox();
    const std::uint64_t now = MonotonicNs();
    const std::uint64_t gap = box.last_clock == 0 ? 0 : now - box.last_clock;
    if (gap > box.max_gap) __atomic_store_n(&box.max_gap, gap, __ATOMIC_RELAXED);
    if (__atomic_load_n(&box.reset_gap, __ATOMIC_RELAXED) != 0) {
      __atomic_store_n(&box.max_gap, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&box.reset_gap, 0, __ATOMIC_RELAXED);
    }
    box.last_clock = now;
    __atomic_store_n(&box.counter, box.counter + 1, __ATOMIC_RELAXED);
    if (box.command == kIdle) return false;
    if ((box.flags & kFlagPaced) != 0) {
      if (box.granted == box.spent) return false;
      ++box.spent;
    }
    Touch(box, (box.flags & kFlagList) != 0 ? shared_.list()[box.index] : box.first + box.index);
    __atomic_store_n(&box.pages_total, box.pages_total + 1, __ATOMIC_RELAXED);
    if (++box.index == box.count) {
      box.index = 0;
      __atomic_store_n(&box.generation, box.generation + 1, __ATOMIC_RELAXED);
      if ((box.flags & kFlagLoop) == 0) __atomic_store_n(&box.command, kIdle, __ATOMIC_RELEASE);
    }
    return true;
  }

  void Touch(Mailbox& box, std::uint32_t pfn) {
    Region* region = shared_.memory.FindByGuestPage(pfn);
    if (region == nullptr) return;
    const std::uint64_t page = pfn - region->guest_address / kPageBytes;
    if (TestBit(region->unreadable, page)) return;
    std::uint8_t* host = region->host + page * kPageBytes;
    if (box.command == kRead) {
      // SAFETY: `host` is page-aligned guest memory; volatile so that the read really happens.
      const std::uint32_t word = *reinterpret_cast<const volatile std::uint32_t*>(host);
      __atomic_store_n(&box.read_sum, box.read_sum + word, __ATOMIC_RELAXED);
      return;
    }
    if (shared_.track) {
      region->log[page / 64].fetch_or(1ULL << (page % 64), std::memory_order_relaxed);
    }
    WritePatternPage(shared_, host, pfn);
  }

  Shared& shared_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> want_parked_{true};
  bool parked_ = false;
  bool stop_ = false;
};

}  // namespace

std::unique_ptr<Backend> MakeThreadBackend(Shared& shared) {
  return std::make_unique<ThreadBackend>(shared);
}

}  // namespace minivm
