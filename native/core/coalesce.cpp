#include "core/coalesce.hpp"

#include <algorithm>
#include <cassert>

namespace varve {
namespace {

// Index of the region that holds image offset `offset`.
std::size_t FindRegion(std::span<const Region> regions, std::uint64_t offset) noexcept {
  const auto after = std::upper_bound(
      regions.begin(), regions.end(), offset,
      [](std::uint64_t value, const Region& region) { return value < region.image_offset; });
  assert(after != regions.begin());
  return static_cast<std::size_t>(after - regions.begin()) - 1;
}

// End (exclusive) of the run that starts at `first`, joined across small gaps, not past `end`.
std::uint64_t RunEnd(ConstBits bits, std::uint64_t first, std::uint64_t end,
                     std::uint64_t join_gap_pages) noexcept {
  std::uint64_t run_end = BitmapNextClear(bits, first, end);
  while (join_gap_pages > 0 && run_end < end) {
    const std::uint64_t look_end =
        join_gap_pages < end - run_end ? run_end + join_gap_pages + 1 : end;
    const std::uint64_t next = BitmapNextSet(bits, run_end, look_end);
    if (next == look_end) break;
    run_end = BitmapNextClear(bits, next, end);
  }
  return run_end;
}

}  // namespace

LayoutFault CheckLayout(ConstBits bits, std::uint64_t page_count,
                        std::span<const Region> regions) noexcept {
  if (page_count > (std::uint64_t{1} << 50) || bits.size() != BitmapBytes(page_count)) {
    return LayoutFault::kBitmapSize;
  }
  const std::uint64_t bit_count = static_cast<std::uint64_t>(bits.size()) * 8;
  if (BitmapNextSet(bits, page_count, bit_count) != bit_count) return LayoutFault::kTailBits;
  std::uint64_t offset = 0;
  for (const Region& region : regions) {
    const bool whole = region.length % kPageBytes == 0 && region.host_address % kPageBytes == 0;
    const bool wraps = region.host_address + region.length < region.host_address ||
                       offset + region.length < offset;
    if (region.image_offset != offset || !whole || wraps) return LayoutFault::kRegions;
    offset += region.length;
  }
  return offset == page_count * kPageBytes ? LayoutFault::kNone : LayoutFault::kRegions;
}

CoalesceOutcome CoalesceBatch(ConstBits bits, std::uint64_t page_count,
                              std::span<const Region> regions, std::uint64_t from_page,
                              const CoalesceLimits& limits, std::span<Row> rows) noexcept {
  const std::uint64_t batch_pages = limits.batch_bytes / kPageBytes;
  const std::uint64_t row_pages = limits.max_segment_bytes / kPageBytes;
  assert(batch_pages > 0 && row_pages > 0 && !rows.empty());
  CoalesceOutcome out{0, 0, from_page};
  std::uint64_t left = batch_pages;
  std::uint64_t page = BitmapNextSet(bits, from_page, page_count);
  while (page < page_count && left > 0 && out.row_count < rows.size()) {
    const Region& region = regions[FindRegion(regions, page * kPageBytes)];
    const std::uint64_t region_end = (region.image_offset + region.length) / kPageBytes;
    // A run is never looked at further than this batch may take it.
    const std::uint64_t end = std::min({region_end, page + left, page + row_pages});
    const std::uint64_t run_end = RunEnd(bits, page, end, limits.join_gap_pages);
    const std::uint64_t offset = page * kPageBytes;
    rows[out.row_count++] = Row{region.host_address + (offset - region.image_offset), offset,
                                (run_end - page) * kPageBytes};
    out.bytes += (run_end - page) * kPageBytes;
    left -= run_end - page;
    out.next_page = run_end;
    page = BitmapNextSet(bits, run_end, page_count);
  }
  if (page >= page_count) out.next_page = page_count;
  return out;
}

}  // namespace varve
