// Turns a page bitmap into ranges to read, a bounded batch at a time.
#pragma once

#include <cstdint>
#include <span>

#include "core/bitmap.hpp"
#include "core/units.hpp"

namespace varve {

struct CoalesceLimits {
  std::uint64_t batch_bytes;        // most bytes in one batch; whole pages, at least one
  std::uint64_t max_segment_bytes;  // most bytes in one row; whole pages, at least one
  std::uint64_t join_gap_pages;     // clean pages that two runs may be joined across
};

struct CoalesceOutcome {
  std::size_t row_count;
  std::uint64_t bytes;      // sum of the rows' lengths
  std::uint64_t next_page;  // where to go on; the page count at the end
};

enum class LayoutFault {
  kNone,
  kBitmapSize,  // shorter or longer than the page count asks for
  kTailBits,    // a bit is set past the page count
  kRegions,     // regions not ascending, adjacent, whole pages, of the page count in total
};

// What is wrong with a bitmap or its regions, checked before any of it is used as an address.
LayoutFault CheckLayout(ConstBits bits, std::uint64_t page_count,
                        std::span<const Region> regions) noexcept;

// Fills `rows` from the set bits at or after `from_page`, ascending in image offset. Neighbours are
// merged; a row never crosses a region. Takes a layout that CheckLayout has passed.
CoalesceOutcome CoalesceBatch(ConstBits bits, std::uint64_t page_count,
                              std::span<const Region> regions, std::uint64_t from_page,
                              const CoalesceLimits& limits, std::span<Row> rows) noexcept;

}  // namespace varve
