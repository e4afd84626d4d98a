#include "core/prefault.hpp"

#include <sys/mman.h>

#include <cstdint>

#include "core/units.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace varve {
namespace {

// The whole pages that lie inside `memory`.
std::span<std::byte> WholePages(std::span<std::byte> memory) noexcept {
  const auto start = reinterpret_cast<std::uintptr_t>(memory.data());
  const std::uintptr_t first = (start + kPageBytes - 1) / kPageBytes * kPageBytes;
  const std::uintptr_t end = (start + memory.size()) / kPageBytes * kPageBytes;
  if (end <= first) return {};
  return memory.subspan(first - start, end - first);
}

void TouchByte(std::byte* at) noexcept {
  // SAFETY: inside the caller's span. Atomic, so that a byte another thread writes is not lost.
  __atomic_fetch_or(reinterpret_cast<std::uint8_t*>(at), std::uint8_t{0}, __ATOMIC_RELAXED);
}

}  // namespace

void AdviseHugePages(std::span<std::byte> memory) noexcept {
  const std::span<std::byte> pages = WholePages(memory);
  if (!pages.empty()) ::madvise(pages.data(), pages.size(), MADV_HUGEPAGE);
}

void TouchPages(std::span<std::byte> memory) noexcept {
  if (memory.empty()) return;
  const std::span<std::byte> pages = WholePages(memory);
  const bool populated =
      !pages.empty() && ::madvise(pages.data(), pages.size(), MADV_POPULATE_WRITE) == 0;
  if (!populated) {
    for (std::size_t i = 0; i < memory.size(); i += kPageBytes) TouchByte(&memory[i]);
  }
  TouchByte(&memory.front());
  TouchByte(&memory.back());
}

}  // namespace varve
