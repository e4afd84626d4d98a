// Page bitmaps: bit i of byte i/8, least significant bit first. Any length, any alignment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace varve {

using Bits = std::span<std::uint8_t>;
using ConstBits = std::span<const std::uint8_t>;

// Bytes of a bitmap of `page_count` pages, in whole 64-bit words.
constexpr std::size_t BitmapBytes(std::uint64_t page_count) noexcept {
  return static_cast<std::size_t>((page_count + 63) / 64 * 8);
}

std::uint64_t BitmapCount(ConstBits bits) noexcept;

// The spans must be of one length.
void BitmapOr(Bits into, ConstBits from) noexcept;
void BitmapAnd(Bits into, ConstBits from) noexcept;
void BitmapAndNot(Bits into, ConstBits from) noexcept;

// The range must lie within the bitmap.
void BitmapSetRange(Bits bits, std::uint64_t first, std::uint64_t count) noexcept;
void BitmapClearRange(Bits bits, std::uint64_t first, std::uint64_t count) noexcept;

// First set (or clear) bit at or after `from`, below `end`; `end` where there is none.
std::uint64_t BitmapNextSet(ConstBits bits, std::uint64_t from, std::uint64_t end) noexcept;
std::uint64_t BitmapNextClear(ConstBits bits, std::uint64_t from, std::uint64_t end) noexcept;

}  // namespace varve
