// What runs the guest: a KVM vCPU, or a thread that does what the vCPU's program would do.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "minivm/guest_memory.hpp"
#include "minivm/mailbox.hpp"

namespace minivm {

// Pages per second for the running program; 0 = as fast as it can. Kept by the VMM, not the guest.
struct Pace {
  std::uint64_t pages_per_second = 0;
  std::uint64_t base_ns = 0;
  std::uint32_t base_granted = 0;
};

std::uint64_t MonotonicNs();

// The device window and what both backends do around it. Owned by Machine.
struct Shared {
  GuestMemory memory;
  std::uint8_t* window = nullptr;
  Pace pace;  // read by the vCPU thread, written only while it is parked
  bool track = false;

  // SAFETY: the window is page-aligned, mapped for the life of the Machine, and starts with
  // Mailbox.
  Mailbox& mailbox() { return *reinterpret_cast<Mailbox*>(window); }
  const std::uint32_t* list() const {
    return reinterpret_cast<const std::uint32_t*>(window + kListOffset);
  }
  std::uint32_t* list() { return reinterpret_cast<std::uint32_t*>(window + kListOffset); }
  const std::uint8_t* pool() const { return window + kPoolOffset; }
};

// Grants the pages that the pace allows by now.
void GrantBudget(Shared& shared);

// Puts into `page` what the guest's program puts into guest page `pfn`.
void WritePatternPage(const Shared& shared, std::uint8_t* page, std::uint32_t pfn);

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;
  // Creates the vCPU, parked. `saved` is what SaveVcpu gave, or empty for a fresh guest.
  virtual Failure Create(const std::vector<std::uint8_t>& saved) = 0;
  // Returns when the vCPU no longer executes. Idempotent.
  virtual void Park() = 0;
  virtual void Unpark() = 0;
  virtual Failure AddRegion(Region& region) = 0;
  virtual Failure DropRegion(Region& region) = 0;
  // Moves the guest's writes since the last call into `fresh` (and clears the log). Parked only.
  virtual Failure FetchLog(Region& region, Bitmap& fresh) = 0;
  virtual Failure SaveVcpu(std::vector<std::uint8_t>& out) = 0;
  // Units per second of Mailbox::last_clock.
  virtual std::uint64_t clock_hz() const = 0;
  // Whether the guest itself can reach this guest-physical page.
  virtual bool CanReach(std::uint64_t pfn) const = 0;
  // Why the vCPU stopped for good; empty while it has not.
  virtual std::string Crash() const { return {}; }
};

std::unique_ptr<Backend> MakeThreadBackend(Shared& shared);
std::unique_ptr<Backend> MakeKvmBackend(Shared& shared);

// Empty if /dev/kvm opens and can run an instruction; otherwise why it can't.
std::string ProbeKvm();

}  // namespace minivm
