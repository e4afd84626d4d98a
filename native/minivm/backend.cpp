#include "minivm/backend.hpp"

#include <ctime>

#include <cstring>

namespace minivm {

std::uint64_t MonotonicNs() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1000000000ULL +
         static_cast<std::uint64_t>(now.tv_nsec);
}

void GrantBudget(Shared& shared) {
  Mailbox& box = shared.mailbox();
  if ((box.flags & kFlagPaced) == 0) return;
  const std::uint64_t elapsed = MonotonicNs() - shared.pace.base_ns;
  const auto due = static_cast<std::uint64_t>(
      static_cast<double>(elapsed) * static_cast<double>(shared.pace.pages_per_second) / 1e9);
  box.granted = shared.pace.base_granted + static_cast<std::uint32_t>(due);
}

void WritePatternPage(const Shared& shared, std::uint8_t* page, std::uint32_t pfn) {
  // SAFETY: the mailbox starts the window (see Shared::mailbox); `page` is kPageBytes of guest
  // memory.
  const auto& box = *reinterpret_cast<const Mailbox*>(shared.window);
  auto* words = reinterpret_cast<std::uint32_t*>(page);
  if (box.command == kFill) {
    for (std::uint32_t i = 0; i < box.words; ++i) words[i] = box.value;
    return;
  }
  const std::uint32_t first = PatternWord(box.value, box.generation, pfn);
  std::memcpy(page, shared.pool() + (first & kPoolMask), box.words * 4ULL);
  words[0] = first;
  words[1] = pfn;
}

}  // namespace minivm
