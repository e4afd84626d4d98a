#include "core/crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace varve {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;

using Table = std::array<std::uint32_t, 256>;

// kSlices[k][b]: the state after byte b and k zero bytes, from state 0.
constexpr std::array<Table, 8> MakeSlices() {
  std::array<Table, 8> slices{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    slices[0][b] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t b = 0; b < 256; ++b) {
      const std::uint32_t crc = slices[k - 1][b];
      slices[k][b] = (crc >> 8) ^ slices[0][crc & 0xff];
    }
  }
  return slices;
}

constexpr std::array<Table, 8> kSlices = MakeSlices();

#if defined(__x86_64__)

// Product of two polynomials modulo the CRC polynomial, both reflected (bit 31 is x^0).
constexpr std::uint32_t Multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1) != 0 ? kPolynomial : 0);
  }
  return product;
}

// x^(8 * bytes) modulo the polynomial: what a state is multiplied with by that many zero bytes.
constexpr std::uint32_t ZerosFactor(std::uint32_t bytes) {
  std::uint32_t factor = 0x80000000u;
  for (std::uint32_t square = 0x00800000u; bytes != 0; bytes >>= 1) {
    if ((bytes & 1) != 0) factor = Multiply(factor, square);
    square = Multiply(square, square);
  }
  return factor;
}

// Shifts a state over `kBytes` zero bytes with four look-ups.
template <std::uint32_t kBytes>
struct ZerosShift {
  static constexpr std::array<Table, 4> Make() {
    std::array<Table, 4> tables{};
    const std::uint32_t factor = ZerosFactor(kBytes);
    for (std::uint32_t k = 0; k < 4; ++k) {
      for (std::uint32_t b = 0; b < 256; ++b) tables[k][b] = Multiply(factor, b << (8 * k));
    }
    return tables;
  }
  static constexpr std::array<Table, 4> kTables = Make();
  static std::uint32_t Apply(std::uint32_t crc) noexcept {
    return kTables[0][crc & 0xff] ^ kTables[1][(crc >> 8) & 0xff] ^
           kTables[2][(crc >> 16) & 0xff] ^ kTables[3][crc >> 24];
  }
};

std::uint64_t Load(const std::byte* at) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, at, 8);
  return word;
}

// The instruction has a latency of three and a throughput of one, so three independent streams of
// `kStride` bytes run side by side and are joined by shifting the states over each other's length.
template <std::uint32_t kStride>
__attribute__((target("sse4.2"))) void ThreeStreams(std::uint32_t& crc, const std::byte*& at,
                                                    std::size_t& left) noexcept {
  static_assert(kStride % 8 == 0);
  while (left >= 3 * std::size_t{kStride}) {
    std::uint64_t a = crc;
    std::uint64_t b = 0;
    std::uint64_t c = 0;
    for (std::uint32_t i = 0; i < kStride; i += 8) {
      a = _mm_crc32_u64(a, Load(at + i));
      b = _mm_crc32_u64(b, Load(at + kStride + i));
      c = _mm_crc32_u64(c, Load(at + 2 * std::size_t{kStride} + i));
    }
    using Shift = ZerosShift<kStride>;
    crc = Shift::Apply(static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b);
    crc = Shift::Apply(crc) ^ static_cast<std::uint32_t>(c);
    at += 3 * std::size_t{kStride};
    left -= 3 * std::size_t{kStride};
  }
}

__attribute__((target("sse4.2"))) std::uint32_t Crc32cHardware(
    std::uint32_t crc, std::span<const std::byte> bytes) noexcept {
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  ThreeStreams<1360>(crc, at, left);  // 4080 bytes: one 4 KiB block, all but its last two words
  ThreeStreams<128>(crc, at, left);
  std::uint64_t wide = crc;
  for (; left >= 8; at += 8, left -= 8) wide = _mm_crc32_u64(wide, Load(at));
  crc = static_cast<std::uint32_t>(wide);
  for (; left > 0; ++at, --left) crc = _mm_crc32_u8(crc, static_cast<std::uint8_t>(*at));
  return crc;
}

#endif

}  // namespace

std::uint32_t Crc32cPortable(std::uint32_t seed, std::span<const std::byte> bytes) noexcept {
  std::uint32_t crc = seed;
  std::size_t i = 0;
  for (; i + 8 <= bytes.size(); i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i, 8);
    word ^= crc;
    crc = 0;
    for (std::size_t k = 0; k < 8; ++k) crc ^= kSlices[7 - k][(word >> (8 * k)) & 0xff];
  }
  for (; i < bytes.size(); ++i) {
    crc = (crc >> 8) ^ kSlices[0][(crc ^ static_cast<std::uint32_t>(bytes[i])) & 0xff];
  }
  return crc;
}

std::uint32_t Crc32c(std::uint32_t seed, std::span<const std::byte> bytes) noexcept {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return Crc32cHardware(seed, bytes);
#endif
  return Crc32cPortable(seed, bytes);
}

}  // namespace varve
