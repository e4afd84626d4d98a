// One bit per 4 KiB page, least significant bit first, in 64-bit words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace minivm {

inline constexpr std::uint64_t kPageBytes = 4096;

using Bitmap = std::vector<std::uint64_t>;

inline std::size_t WordsFor(std::uint64_t pages) {
  return static_cast<std::size_t>((pages + 63) / 64);
}
inline bool TestBit(const Bitmap& bits, std::uint64_t page) {
  return (bits[page / 64] >> (page % 64)) & 1U;
}
inline void SetBit(Bitmap& bits, std::uint64_t page) { bits[page / 64] |= 1ULL << (page % 64); }
inline void ClearBit(Bitmap& bits, std::uint64_t page) {
  bits[page / 64] &= ~(1ULL << (page % 64));
}

inline void OrInto(Bitmap& into, const Bitmap& from) {
  for (std::size_t i = 0; i < into.size(); ++i) into[i] |= from[i];
}
inline void AndNotInto(Bitmap& into, const Bitmap& from) {
  for (std::size_t i = 0; i < into.size(); ++i) into[i] &= ~from[i];
}
inline void ClearAll(Bitmap& bits) { bits.assign(bits.size(), 0); }
inline std::uint64_t CountBits(const Bitmap& bits) {
  std::uint64_t total = 0;
  for (const std::uint64_t word : bits)
    total += static_cast<std::uint64_t>(__builtin_popcountll(word));
  return total;
}

// Calls run(first_page, page_count) for every run of set bits below `pages`, ascending. Stops when
// `run` returns false, and returns false then.
template <typename Run>
bool ForEachRun(const Bitmap& bits, std::uint64_t pages, Run run) {
  std::uint64_t page = 0;
  while (page < pages) {
    const std::uint64_t word = bits[page / 64] >> (page % 64);
    if (word == 0) {
      page = (page / 64 + 1) * 64;
      continue;
    }
    page += static_cast<std::uint64_t>(__builtin_ctzll(word));
    if (page >= pages) break;
    const std::uint64_t first = page;
    while (page < pages) {
      const std::uint64_t inverse = ~bits[page / 64] >> (page % 64);
      if (inverse != 0) {
        page += static_cast<std::uint64_t>(__builtin_ctzll(inverse));
        break;
      }
      page = (page / 64 + 1) * 64;
    }
    if (page > pages) page = pages;
    if (!run(first, page - first)) return false;
  }
  return true;
}

}  // namespace minivm
