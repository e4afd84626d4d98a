// Merging indexes, checked against painting sectors one by one.
#include <array>
#include <cstdlib>
#include <vector>

#include "core/layer_index.hpp"

namespace {

constexpr std::uint64_t kSectors = 512;
constexpr std::int64_t kHole = -1;
constexpr std::int64_t kZero = -2;
using Image = std::array<std::int64_t, kSectors>;

// A sorted index from bytes: three each, gap, length and kind.
std::vector<varve::IndexEntry> Parse(const std::uint8_t*& data, const std::uint8_t* end) {
  std::vector<varve::IndexEntry> out;
  std::uint64_t at = 0;
  std::uint64_t moffset = 8;
  while (end - data >= 3 && data[0] != 255) {
    const std::uint64_t offset = at + data[0] % 64;
    const std::uint64_t length = 1 + data[1] % 64;
    const bool zeroed = (data[2] & 1) != 0;
    data += 3;
    if (offset + length > kSectors) continue;
    out.push_back(varve::IndexEntry::Make(offset, length, moffset, zeroed));
    moffset += length + (data[-1] >> 4);
    at = offset + length;
  }
  if (data != end) ++data;
  return out;
}

void Paint(Image& image, const varve::IndexEntry& entry, std::uint64_t layer) {
  for (std::uint64_t i = 0; i < entry.length(); ++i) {
    image[entry.offset() + i] =
        entry.zeroed() ? kZero : static_cast<std::int64_t>(layer << 32 | (entry.moffset() + i));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::uint8_t* end = data + size;
  varve::IndexMerger merger;
  Image expected;
  expected.fill(kHole);
  for (std::uint8_t layer = 0; layer < 20 && data != end; ++layer) {
    auto entries = Parse(data, end);
    for (const auto& entry : entries) Paint(expected, entry, layer);
    merger.Add(std::move(entries), layer);
  }
  Image got;
  got.fill(kHole);
  std::uint64_t at = 0;
  const auto merged = merger.Finish();
  for (const auto& entry : merged) {
    if (entry.length() == 0 || entry.offset() < at) std::abort();
    at = entry.end();
    Paint(got, entry, entry.tag());
    if (varve::FindEntry(merged, entry.offset()) >= merged.size()) std::abort();
  }
  if (got != expected) std::abort();
  return 0;
}
