// Sizes and layouts that the addon and its TypeScript faces agree on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace varve {

inline constexpr std::uint64_t kPageBytes = 4096;

// Raised with every incompatible change of a native function or row layout; src/native/load.ts
// refuses a file with another number.
inline constexpr std::uint32_t kAbiVersion = 1;

// One range of guest memory, as the coalescer emits and the readers take it.
struct Row {
  std::uint64_t host_address;  // bytes, in the address space of the VMM
  std::uint64_t image_offset;  // bytes, in the memory image
  std::uint64_t length;        // bytes
};
static_assert(sizeof(Row) == 24);

// One region of guest memory. Field order differs from Row: it is that of the callers' layouts.
struct Region {
  std::uint64_t image_offset;  // bytes
  std::uint64_t length;        // bytes
  std::uint64_t host_address;  // bytes
};
static_assert(sizeof(Region) == 24);

}  // namespace varve
