// StackReader::Compare: equal pages are found with few, large reads of exactly what is compared.
#include <algorithm>
#include <cstring>

#include "core/layer_index.hpp"
#include "core/layer_reader.hpp"

namespace varve {
namespace {

constexpr std::uint64_t kPage = 4096;
// One read: fits the second-level cache, so that comparing touches memory once.
constexpr std::uint64_t kScratchBytes = 256 << 10;
// Unwanted bytes worth reading to save a system call.
constexpr std::uint64_t kGapBytes = 8 << 10;

void Differ(std::span<std::uint8_t> equal, std::uint64_t page) noexcept {
  equal[page / 8] = static_cast<std::uint8_t>(equal[page / 8] & ~(1u << (page % 8)));
}

bool AllZero(const std::byte* bytes, std::uint64_t length) noexcept {
  if (length == 0) return true;
  return bytes[0] == std::byte{0} && std::memcmp(bytes, bytes + 1, length - 1) == 0;
}

}  // namespace

// Bytes of the slab to be compared with bytes of one layer's content.
struct StackReader::Piece {
  std::uint64_t source;     // bytes, in the layer's content
  std::uint64_t length;
  const std::byte* wanted;  // in the slab; null: zeros
  std::uint64_t page;       // of the rows, that the first byte belongs to
  std::uint32_t in_page;    // bytes into that page
  std::uint32_t layer;
};

// Clears the bits of pages where `have` differs from what the slab holds.
static void ComparePages(const std::byte* have, const std::byte* wanted, std::uint64_t length,
                         std::uint64_t page, std::uint64_t in_page,
                         std::span<std::uint8_t> equal) noexcept {
  while (length > 0) {
    const std::uint64_t step = std::min(kPage - in_page, length);
    const bool same = wanted == nullptr ? AllZero(have, step)
                                        : std::memcmp(have, wanted, step) == 0;
    if (!same) Differ(equal, page);
    have += step;
    if (wanted != nullptr) wanted += step;
    length -= step;
    ++page;
    in_page = 0;
  }
}

void StackReader::AddPieces(const LayerRow& row, ConstLayerBytes slab, std::uint64_t first_page,
                            std::span<std::uint8_t> equal, std::vector<Piece>& pieces) noexcept {
  const auto entries = pack_.entries();
  const std::byte* bytes =
      row.slab_offset == kZeroedRow ? nullptr : slab.data() + row.slab_offset;
  const std::uint64_t end = row.image_offset + row.length;
  std::uint64_t at = row.image_offset;
  // Where the stack reads zero.
  const auto zeros = [&](std::uint64_t until) {
    const std::uint64_t from = at - row.image_offset;
    if (bytes != nullptr) {
      ComparePages(bytes + from, nullptr, until - at, first_page + from / kPage, from % kPage,
                   equal);
    }
    at = until;
  };
  for (std::size_t i = FindEntry(entries, at / kSectorBytes); i < entries.size() && at < end; ++i) {
    const IndexEntry& entry = entries[i];
    const std::uint64_t start = entry.offset() * kSectorBytes;
    if (start >= end) break;
    if (start > at) zeros(start);
    const std::uint64_t stop = std::min(end, entry.end() * kSectorBytes);
    if (entry.zeroed()) {
      zeros(stop);
      continue;
    }
    // In pieces that fit the scratch.
    while (at < stop) {
      const std::uint64_t length = std::min(stop - at, kScratchBytes);
      const std::uint64_t from = at - row.image_offset;
      pieces.push_back({.source = entry.moffset() * kSectorBytes + (at - start),
                        .length = length,
                        .wanted = bytes == nullptr ? nullptr : bytes + from,
                        .page = first_page + from / kPage,
                        .in_page = static_cast<std::uint32_t>(from % kPage),
                        .layer = entry.tag()});
      at += length;
    }
  }
  if (at < end) zeros(end);
}

LayerFault StackReader::ComparePieces(std::span<const Piece> pieces, LayerBytes scratch,
                                      std::span<std::uint8_t> equal) noexcept {
  const Piece& first = pieces.front();
  std::uint64_t end = first.source;
  for (const Piece& piece : pieces) end = std::max(end, piece.source + piece.length);
  const LayerBytes bytes = scratch.first(end - first.source);
  if (auto f = ReadContent(first.layer, first.source, bytes); !f.ok()) return f;
  for (const Piece& piece : pieces) {
    ComparePages(bytes.data() + (piece.source - first.source), piece.wanted, piece.length,
                 piece.page, piece.in_page, equal);
  }
  return {};
}

LayerFault StackReader::Compare(std::span<const LayerRow> rows, ConstLayerBytes slab,
                                std::span<std::uint8_t> equal,
                                const std::int32_t* cancel) noexcept {
  if (!pack_.Enter()) return MakeFault(fault::kClosed, "stack", 0);
  std::uint64_t pages = 0;
  std::vector<Piece> pieces;
  for (const LayerRow& row : rows) pages += row.length / kPage;
  for (std::uint64_t page = 0; page < pages; ++page) {
    equal[page / 8] = static_cast<std::uint8_t>(equal[page / 8] | 1u << (page % 8));
  }
  std::uint64_t page = 0;
  for (const LayerRow& row : rows) {
    AddPieces(row, slab, page, equal, pieces);
    page += row.length / kPage;
  }
  std::ranges::sort(pieces, [](const Piece& a, const Piece& b) {
    return a.layer != b.layer ? a.layer < b.layer : a.source < b.source;
  });
  std::vector<std::byte> scratch(pieces.empty() ? 0 : kScratchBytes);
  LayerFault f;
  for (std::size_t i = 0; i < pieces.size() && f.ok();) {
    if (cancel != nullptr && __atomic_load_n(cancel, __ATOMIC_ACQUIRE) != 0) break;
    std::size_t j = i + 1;
    std::uint64_t end = pieces[i].source + pieces[i].length;
    while (j < pieces.size() && pieces[j].layer == pieces[i].layer &&
           pieces[j].source <= end + kGapBytes &&
           pieces[j].source + pieces[j].length - pieces[i].source <= kScratchBytes) {
      end = std::max(end, pieces[j].source + pieces[j].length);
      ++j;
    }
    f = ComparePieces(std::span(pieces).subspan(i, j - i), scratch, equal);
    i = j;
  }
  pack_.Leave();
  return f;
}

}  // namespace varve
