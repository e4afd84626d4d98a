// Finds pages of nothing but zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/bitmap.hpp"

namespace varve {

enum class SimdLevel { kPortable, kAvx2, kAvx512 };

// The widest vectors this processor (and its operating system) can use.
SimdLevel BestSimdLevel() noexcept;

// Sets bit i of `out` where page i of `pages` is all zero, and clears it elsewhere. `pages` is
// whole pages; `out` is as long as BitmapBytes says. `level` must not be above BestSimdLevel().
void FindZeroPages(std::span<const std::byte> pages, Bits out, SimdLevel level) noexcept;

}  // namespace varve
