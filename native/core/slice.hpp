// One call's share of time, and the word that asks it to stop.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/syscalls.hpp"

namespace varve {

// Longest stretch a native call works before it hands back to JavaScript. A worker that is being
// terminated waits for the native call it is in, so this bounds that wait.
inline constexpr std::uint64_t kSliceNs = 8'000'000;

class Slice {
 public:
  // `cancel_word` may be null. SAFETY: the caller keeps it alive for the life of the slice.
  Slice(const Syscalls& sys, const std::int32_t* cancel_word,
        std::uint64_t budget_ns = kSliceNs) noexcept
      : sys_(sys), cancel_word_(cancel_word), end_ns_(sys.now_ns() + budget_ns) {}

  bool Expired() const noexcept { return sys_.now_ns() >= end_ns_; }

  bool Cancelled() const noexcept {
    if (cancel_word_ == nullptr) return false;
    return __atomic_load_n(cancel_word_, __ATOMIC_ACQUIRE) != 0;
  }

 private:
  const Syscalls& sys_;
  const std::int32_t* cancel_word_;
  std::uint64_t end_ns_;
};

}  // namespace varve
