#include <array>
#include <vector>

#include "check.hpp"
#include "core/bitmap.hpp"
#include "core/coalesce.hpp"

namespace varve::test {
namespace {

std::vector<bool> Model(ConstBits bits) {
  std::vector<bool> model(bits.size() * 8);
  for (std::size_t i = 0; i < model.size(); ++i) model[i] = (bits[i / 8] >> (i % 8) & 1) != 0;
  return model;
}

void RangesAndCombinations() {
  Random random(Seed());
  for (int round = 0; round < 400; ++round) {
    const std::size_t bytes = 1 + random.Below(40);
    std::vector<std::uint8_t> a(bytes);
    std::vector<std::uint8_t> b(bytes);
    for (auto& byte : b) byte = static_cast<std::uint8_t>(random.Next());
    std::vector<bool> model(bytes * 8);
    for (int step = 0; step < 6; ++step) {
      const std::uint64_t first = random.Below(bytes * 8 + 1);
      const std::uint64_t count = random.Below(bytes * 8 - first + 1);
      const bool set = random.Below(3) > 0;
      set ? BitmapSetRange(a, first, count) : BitmapClearRange(a, first, count);
      for (std::uint64_t i = first; i < first + count; ++i) model[i] = set;
    }
    CHECK(Model(a) == model);
    std::uint64_t count = 0;
    for (const bool bit : model) count += bit ? 1 : 0;
    CHECK_EQ(BitmapCount(a), count);
    for (std::uint64_t from = 0; from <= model.size(); ++from) {
      std::uint64_t set = from;
      std::uint64_t clear = from;
      while (set < model.size() && !model[set]) ++set;
      while (clear < model.size() && model[clear]) ++clear;
      CHECK_EQ(BitmapNextSet(a, from, model.size()), set);
      CHECK_EQ(BitmapNextClear(a, from, model.size()), clear);
    }
    auto combined = a;
    BitmapOr(combined, b);
    for (std::size_t i = 0; i < bytes; ++i) CHECK_EQ(combined[i], a[i] | b[i]);
    combined = a;
    BitmapAnd(combined, b);
    for (std::size_t i = 0; i < bytes; ++i) CHECK_EQ(combined[i], a[i] & b[i]);
    combined = a;
    BitmapAndNot(combined, b);
    for (std::size_t i = 0; i < bytes; ++i) CHECK_EQ(combined[i], a[i] & ~b[i] & 0xff);
  }
}

struct Image {
  std::vector<Region> regions;
  std::vector<std::uint8_t> bits;
  std::uint64_t page_count = 0;

  void Add(std::uint64_t pages, std::uint64_t address) {
    regions.push_back({page_count * kPageBytes, pages * kPageBytes, address});
    page_count += pages;
    bits.resize(BitmapBytes(page_count));
  }
};

// Every batch of the image; checks each against the limits, and all together against the bitmap.
std::vector<Row> AllRows(const Image& image, const CoalesceLimits& limits, std::size_t max_rows) {
  std::vector<Row> all;
  std::vector<Row> rows(max_rows);
  std::uint64_t page = 0;
  while (page < image.page_count) {
    const auto batch =
        CoalesceBatch(image.bits, image.page_count, image.regions, page, limits, rows);
    CHECK(batch.next_page > page);
    CHECK(batch.bytes <= limits.batch_bytes && batch.row_count <= max_rows);
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < batch.row_count; ++i) {
      bytes += rows[i].length;
      CHECK(rows[i].length > 0 && rows[i].length <= limits.max_segment_bytes);
      all.push_back(rows[i]);
    }
    CHECK_EQ(bytes, batch.bytes);
    CHECK(batch.row_count > 0 || batch.next_page == image.page_count);
    page = batch.next_page;
  }
  return all;
}

void CheckRows(const Image& image, const std::vector<Row>& rows, std::uint64_t join_gap_pages) {
  std::vector<std::uint8_t> covered(image.bits.size());
  std::uint64_t end = 0;
  for (const Row& row : rows) {
    CHECK(row.image_offset >= end);
    end = row.image_offset + row.length;
    bool inside = false;
    for (const Region& region : image.regions) {
      const bool starts = row.image_offset >= region.image_offset;
      if (starts && end <= region.image_offset + region.length) {
        inside = row.host_address == region.host_address + row.image_offset - region.image_offset;
      }
    }
    CHECK(inside);
    BitmapSetRange(covered, row.image_offset / kPageBytes, row.length / kPageBytes);
  }
  auto missed = image.bits;
  BitmapAndNot(missed, covered);
  CHECK_EQ(BitmapCount(missed), 0u);
  if (join_gap_pages == 0) CHECK_EQ(BitmapCount(covered), BitmapCount(image.bits));
}

void CoalescingAgreesWithTheBitmap() {
  Random random(Seed() + 1);
  for (int round = 0; round < 600; ++round) {
    Image image;
    const std::uint64_t region_count = 1 + random.Below(4);
    for (std::uint64_t i = 0; i < region_count; ++i) {
      const std::uint64_t pages = random.Below(8) == 0 ? 0 : 1 + random.Below(200);
      image.Add(pages, (i + 1) << 40);
    }
    if (image.page_count == 0) continue;
    const std::uint64_t density = 1 + random.Below(20);
    for (std::uint64_t page = 0; page < image.page_count; ++page) {
      if (random.Below(20) < density) BitmapSetRange(image.bits, page, 1);
    }
    CHECK(CheckLayout(image.bits, image.page_count, image.regions) == LayoutFault::kNone);
    const CoalesceLimits limits{(1 + random.Below(64)) * kPageBytes,
                                (1 + random.Below(64)) * kPageBytes, random.Below(4)};
    const auto rows = AllRows(image, limits, 1 + random.Below(32));
    CheckRows(image, rows, limits.join_gap_pages);
  }
}

void A65PageRegionEndsAtItsEnd() {
  Image image;
  image.Add(65, 0x10000000);
  BitmapSetRange(image.bits, 60, 5);
  const auto rows = AllRows(image, {1u << 20, 1u << 20, 16}, 8);
  CHECK_EQ(rows.size(), 1u);
  CHECK_EQ(rows[0].image_offset, 60 * kPageBytes);
  CHECK_EQ(rows[0].length, 5 * kPageBytes);
  // A bit past the region's end is a fault of the sender's, never a page.
  BitmapSetRange(image.bits, 65, 1);
  CHECK(CheckLayout(image.bits, 65, image.regions) == LayoutFault::kTailBits);
  image.bits.resize(8);
  CHECK(CheckLayout(image.bits, 65, image.regions) == LayoutFault::kBitmapSize);
  image.bits.resize(24);
  CHECK(CheckLayout(image.bits, 65, image.regions) == LayoutFault::kBitmapSize);
}

void LayoutsThatLieAreFaults() {
  std::array<std::uint8_t, 8> bits{};
  const auto fault = [&](std::initializer_list<Region> regions) {
    const std::vector<Region> list(regions);
    return CheckLayout(bits, 4, list) == LayoutFault::kRegions;
  };
  constexpr std::uint64_t kPage = kPageBytes;
  CHECK(!fault({{0, 4 * kPage, kPage}}));
  CHECK(!fault({{0, 0, kPage}, {0, 4 * kPage, kPage}}));
  CHECK(fault({}));
  CHECK(fault({{0, 3 * kPage, kPage}}));
  CHECK(fault({{0, 5 * kPage, kPage}}));
  CHECK(fault({{kPage, 4 * kPage, kPage}}));
  CHECK(fault({{0, 2 * kPage, kPage}, {3 * kPage, 2 * kPage, kPage}}));
  CHECK(fault({{0, 2 * kPage, kPage}, {kPage, 2 * kPage, kPage}}));
  CHECK(fault({{0, 4 * kPage, 1}}));
  CHECK(fault({{0, 4 * kPage, ~std::uint64_t{0} - 4095}}));
  CHECK(fault({{0, ~std::uint64_t{0} - 4095, 0}, {~std::uint64_t{0} - 4095, 5 * kPage, 0}}));
  CHECK(CheckLayout({}, 0, {}) == LayoutFault::kNone);
}

void GapsJoinOnlyWhereTheyAreSmall() {
  Image image;
  image.Add(64, 0x10000000);
  for (const std::uint64_t page : {1, 3, 6, 10}) BitmapSetRange(image.bits, page, 1);
  CHECK_EQ(AllRows(image, {1u << 20, 1u << 20, 0}, 64).size(), 4u);
  CHECK_EQ(AllRows(image, {1u << 20, 1u << 20, 1}, 64).size(), 3u);
  CHECK_EQ(AllRows(image, {1u << 20, 1u << 20, 2}, 64).size(), 2u);
  const auto rows = AllRows(image, {1u << 20, 1u << 20, ~std::uint64_t{0}}, 64);
  CHECK_EQ(rows.size(), 1u);
  CHECK_EQ(rows[0].length, 10 * kPageBytes);
}

constexpr std::array kFacts{
    Fact{"bitmap operations agree with a plain array", RangesAndCombinations},
    Fact{"coalescing agrees with the bitmap, within every limit", CoalescingAgreesWithTheBitmap},
    Fact{"a 65-page region ends at its end", A65PageRegionEndsAtItsEnd},
    Fact{"layouts that lie are faults", LayoutsThatLieAreFaults},
    Fact{"gaps join only where they are small", GapsJoinOnlyWhereTheyAreSmall},
};

}  // namespace

std::span<const Fact> BitmapFacts() { return kFacts; }

}  // namespace varve::test
