#include "core/bitmap.hpp"

#include <bit>
#include <cassert>
#include <cstring>

namespace varve {
namespace {

static_assert(std::endian::native == std::endian::little, "word loads assume little endian");

std::uint64_t LoadWord(ConstBits bits, std::size_t byte) noexcept {
  std::uint64_t word = 0;
  const std::size_t left = bits.size() - byte;
  std::memcpy(&word, bits.data() + byte, left < 8 ? left : 8);
  return word;
}

template <typename Op>
void Combine(Bits into, ConstBits from, Op op) noexcept {
  assert(into.size() == from.size());
  std::size_t i = 0;
  for (; i + 8 <= into.size(); i += 8) {
    std::uint64_t a = 0;
    std::uint64_t b = 0;
    std::memcpy(&a, into.data() + i, 8);
    std::memcpy(&b, from.data() + i, 8);
    a = op(a, b);
    std::memcpy(into.data() + i, &a, 8);
  }
  for (; i < into.size(); ++i) {
    into[i] = static_cast<std::uint8_t>(op(into[i], from[i]));
  }
}

// Bits of byte `byte` that lie in [first, end).
std::uint8_t ByteMask(std::uint64_t byte, std::uint64_t first, std::uint64_t end) noexcept {
  const std::uint64_t low = byte * 8;
  std::uint32_t mask = 0xff;
  if (first > low) mask &= 0xffu << (first - low);
  if (end < low + 8) mask &= 0xffu >> (low + 8 - end);
  return static_cast<std::uint8_t>(mask);
}

template <bool kSet>
void FillRange(Bits bits, std::uint64_t first, std::uint64_t count) noexcept {
  if (count == 0) return;
  const std::uint64_t end = first + count;
  assert(end >= first && (end + 7) / 8 <= bits.size());
  const std::uint64_t first_byte = first / 8;
  const std::uint64_t last_byte = (end - 1) / 8;
  for (const std::uint64_t byte : {first_byte, last_byte}) {
    const std::uint8_t mask = ByteMask(byte, first, end);
    bits[byte] = static_cast<std::uint8_t>(kSet ? bits[byte] | mask : bits[byte] & ~mask);
  }
  if (last_byte > first_byte + 1) {
    std::memset(bits.data() + first_byte + 1, kSet ? 0xff : 0, last_byte - first_byte - 1);
  }
}

// `kFlip` is all ones to look for clear bits, zero for set ones.
template <std::uint64_t kFlip>
std::uint64_t Next(ConstBits bits, std::uint64_t from, std::uint64_t end) noexcept {
  assert((end + 7) / 8 <= bits.size());
  if (from >= end) return end;
  std::uint64_t base = from / 64 * 64;
  std::uint64_t word = (LoadWord(bits, base / 8) ^ kFlip) & (~std::uint64_t{0} << (from - base));
  while (word == 0) {
    base += 64;
    if (base >= end) return end;
    word = LoadWord(bits, base / 8) ^ kFlip;
  }
  const std::uint64_t found = base + static_cast<std::uint64_t>(std::countr_zero(word));
  return found < end ? found : end;
}

}  // namespace

std::uint64_t BitmapCount(ConstBits bits) noexcept {
  std::uint64_t count = 0;
  for (std::size_t i = 0; i < bits.size(); i += 8) {
    count += static_cast<std::uint64_t>(std::popcount(LoadWord(bits, i)));
  }
  return count;
}

void BitmapOr(Bits into, ConstBits from) noexcept {
  Combine(into, from, [](std::uint64_t a, std::uint64_t b) { return a | b; });
}

void BitmapAnd(Bits into, ConstBits from) noexcept {
  Combine(into, from, [](std::uint64_t a, std::uint64_t b) { return a & b; });
}

void BitmapAndNot(Bits into, ConstBits from) noexcept {
  Combine(into, from, [](std::uint64_t a, std::uint64_t b) { return a & ~b; });
}

void BitmapSetRange(Bits bits, std::uint64_t first, std::uint64_t count) noexcept {
  FillRange<true>(bits, first, count);
}

void BitmapClearRange(Bits bits, std::uint64_t first, std::uint64_t count) noexcept {
  FillRange<false>(bits, first, count);
}

std::uint64_t BitmapNextSet(ConstBits bits, std::uint64_t from, std::uint64_t end) noexcept {
  return Next<0>(bits, from, end);
}

std::uint64_t BitmapNextClear(ConstBits bits, std::uint64_t from, std::uint64_t end) noexcept {
  return Next<~std::uint64_t{0}>(bits, from, end);
}

}  // namespace varve
