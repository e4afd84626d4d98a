#include "core/zero_scan.hpp"

#include <cassert>
#include <cstring>

#include "core/units.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace varve {
namespace {

// Each of these reads one page and stops at the first block that holds a set bit: most pages that
// are not zero are known by their first cache lines, and a zero page costs one pass over it.
constexpr std::size_t kBlockBytes = 256;

bool IsZeroPortable(const std::byte* page) noexcept {
  for (std::size_t i = 0; i < kPageBytes; i += kBlockBytes) {
    std::uint64_t seen = 0;
    for (std::size_t j = 0; j < kBlockBytes; j += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, page + i + j, 8);
      seen |= word;
    }
    if (seen != 0) return false;
  }
  return true;
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) bool IsZeroAvx2(const std::byte* page) noexcept {
  for (std::size_t i = 0; i < kPageBytes; i += kBlockBytes) {
    // SAFETY: within the page; unaligned loads.
    const auto* at = reinterpret_cast<const __m256i*>(page + i);
    __m256i a = _mm256_or_si256(_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1));
    __m256i b = _mm256_or_si256(_mm256_loadu_si256(at + 2), _mm256_loadu_si256(at + 3));
    __m256i c = _mm256_or_si256(_mm256_loadu_si256(at + 4), _mm256_loadu_si256(at + 5));
    __m256i d = _mm256_or_si256(_mm256_loadu_si256(at + 6), _mm256_loadu_si256(at + 7));
    a = _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
    if (_mm256_testz_si256(a, a) == 0) return false;
  }
  return true;
}

__attribute__((target("avx512f"))) bool IsZeroAvx512(const std::byte* page) noexcept {
  for (std::size_t i = 0; i < kPageBytes; i += kBlockBytes) {
    const std::byte* at = page + i;
    // SAFETY: within the page; unaligned loads.
    const __m512i a = _mm512_or_si512(_mm512_loadu_si512(at), _mm512_loadu_si512(at + 64));
    const __m512i b = _mm512_or_si512(_mm512_loadu_si512(at + 128), _mm512_loadu_si512(at + 192));
    const __m512i c = _mm512_or_si512(a, b);
    if (_mm512_test_epi64_mask(c, c) != 0) return false;
  }
  return true;
}

#endif

using IsZero = bool (*)(const std::byte*) noexcept;

IsZero Choose(SimdLevel level) noexcept {
#if defined(__x86_64__)
  if (level == SimdLevel::kAvx512) return IsZeroAvx512;
  if (level == SimdLevel::kAvx2) return IsZeroAvx2;
#endif
  return IsZeroPortable;
}

}  // namespace

SimdLevel BestSimdLevel() noexcept {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return SimdLevel::kAvx512;
  if (__builtin_cpu_supports("avx2")) return SimdLevel::kAvx2;
#endif
  return SimdLevel::kPortable;
}

void FindZeroPages(std::span<const std::byte> pages, Bits out, SimdLevel level) noexcept {
  const std::size_t count = pages.size() / kPageBytes;
  assert(pages.size() % kPageBytes == 0 && out.size() == BitmapBytes(count));
  const IsZero is_zero = Choose(level);
  std::memset(out.data(), 0, out.size());
  for (std::size_t i = 0; i < count; ++i) {
    if (is_zero(pages.data() + i * kPageBytes)) {
      out[i / 8] = static_cast<std::uint8_t>(out[i / 8] | (1u << (i % 8)));
    }
  }
}

}  // namespace varve
