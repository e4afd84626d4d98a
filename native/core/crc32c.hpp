// CRC-32C (Castagnoli, reflected 0x82F63B78) as ZFile uses it: no initial inversion, no final one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace varve {

// Continues `seed` over `bytes`: Crc32c(Crc32c(s, a), b) == Crc32c(s, ab). Uses the processor's
// instruction where it has one. From a standard CRC-32C: raw(seed, d) = ~update(~seed, d).
std::uint32_t Crc32c(std::uint32_t seed, std::span<const std::byte> bytes) noexcept;

// The same by tables alone.
std::uint32_t Crc32cPortable(std::uint32_t seed, std::span<const std::byte> bytes) noexcept;

}  // namespace varve
