#include "core/layer_lsmt.hpp"

#include <algorithm>
#include <cstring>

namespace varve {
namespace {

constexpr std::array<std::uint8_t, 24> kMagic = {0x4c, 0x53, 0x4d, 0x54, 0x00, 0x01, 0x02, 0x00,
                                                 0x65, 0x7e, 0x63, 0xd2, 0x94, 0x44, 0x08, 0x4c,
                                                 0xa2, 0xd2, 0xc8, 0xec, 0x4f, 0xcf, 0xae, 0x8a};
constexpr std::size_t kStructBytes = 390;
constexpr std::size_t kSizeAt = 24;
constexpr std::size_t kFlagsAt = 28;
constexpr std::size_t kIndexOffsetAt = 32;
constexpr std::size_t kIndexSizeAt = 40;
constexpr std::size_t kVirtualSizeAt = 48;
constexpr std::size_t kUuidAt = 56;
constexpr std::size_t kParentUuidAt = 93;
constexpr std::size_t kVersionAt = 132;
constexpr std::size_t kUserTagAt = 134;
constexpr std::size_t kUserTagBytes = 256;
constexpr std::size_t kUuidText = 36;
// Layers sealed in place have less than one sector between index and trailer.
constexpr std::uint64_t kGapScanBytes = 16384;

int HexDigit(char c) noexcept {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

bool IsDash(std::size_t i) noexcept { return i == 8 || i == 13 || i == 18 || i == 23; }

// All NUL means none; otherwise 36 characters and a NUL.
bool LoadUuid(ConstLayerBytes block, std::size_t at, UuidBytes& out) noexcept {
  const auto field = block.subspan(at, kUuidText + 1);
  if (std::ranges::all_of(field, [](std::byte b) { return b == std::byte{0}; })) {
    out = {};
    return true;
  }
  if (field[kUuidText] != std::byte{0}) return false;
  // SAFETY: 36 characters inside the block; char may alias std::byte.
  return ParseUuid(reinterpret_cast<const char*>(field.data()), out);
}

LayerFault CheckEntry(const IndexEntry& entry, std::uint64_t at, std::uint64_t data_end_sector,
                      std::uint64_t previous_end) noexcept {
  if (entry.offset() < previous_end) {
    return MakeFault(fault::kCorrupt, "index.offset", at, entry.offset());
  }
  const std::uint64_t stored = entry.zeroed() ? 0 : entry.length();
  const std::uint64_t moffset = entry.moffset();
  if (moffset < kFirstDataSector || moffset > data_end_sector ||
      stored > data_end_sector - moffset) {
    return MakeFault(fault::kCorrupt, "index.moffset", at, moffset);
  }
  return {};
}

// Reads the index in pieces and keeps the valid entries, so that what is allocated follows what
// was read and checked.
LayerFault ReadIndex(ByteSource& content, LsmtLayer& layer) noexcept {
  constexpr std::uint64_t kPiece = 4096;
  std::array<IndexEntry, kPiece> piece;
  const std::uint64_t data_end_sector = layer.trailer.index_offset / kSectorBytes;
  std::uint64_t previous_end = 0;
  for (std::uint64_t first = 0; first < layer.trailer.index_entries; first += kPiece) {
    const std::uint64_t count = std::min(kPiece, layer.trailer.index_entries - first);
    const std::uint64_t at = layer.trailer.index_offset + first * sizeof(IndexEntry);
    const auto bytes = std::as_writable_bytes(std::span(piece).first(count));
    if (auto f = content.Read(at, bytes); !f.ok()) return f;
    for (std::uint64_t i = 0; i < count; ++i) {
      IndexEntry entry = piece[i];
      if (entry.offset() == kInvalidOffset) continue;
      const auto f = CheckEntry(entry, at + i * sizeof(IndexEntry), data_end_sector, previous_end);
      if (!f.ok()) return f;
      if (entry.length() == 0) continue;
      previous_end = entry.end();
      entry.word1 &= (1ull << 56) - 1;  // readers ignore the tag
      layer.entries.push_back(entry);
    }
  }
  return {};
}

// A gap between index and trailer may hold padding, but no header or trailer: then the trailer that
// was found belongs to a second layer, glued on behind the first.
LayerFault CheckGap(ByteSource& content, std::uint64_t gap_bytes, std::uint64_t gap_at) noexcept {
  if (gap_bytes == 0) return {};
  std::array<std::byte, kMagic.size()> start;
  const auto holds_magic = [&](std::uint64_t at, LayerFault& f) {
    f = content.Read(at, start);
    return f.ok() && std::memcmp(start.data(), kMagic.data(), kMagic.size()) == 0;
  };
  LayerFault f;
  // Where the second layer starts if its own index is followed by its trailer.
  if (holds_magic(gap_bytes, f)) return MakeFault(fault::kTrailingBytes, "header", gap_bytes);
  if (!f.ok()) return f;
  // Where the first layer's own trailer is if the index is the first layer's.
  const std::uint64_t end = gap_at + std::min(gap_bytes, kGapScanBytes);
  for (std::uint64_t at = (gap_at + kSectorBytes - 1) / kSectorBytes * kSectorBytes; at < end;
       at += kSectorBytes) {
    if (holds_magic(at, f)) return MakeFault(fault::kTrailingBytes, "trailer", at);
    if (!f.ok()) return f;
  }
  return {};
}

LayerFault CheckTrailer(ByteSource& content, LsmtLayer& layer) noexcept {
  const std::uint64_t trailer_at = layer.content_bytes - kLsmtBlockBytes;
  const LsmtHeader& t = layer.trailer;
  if (t.virtual_bytes > kVirtualBytesMax) {
    return MakeFault(fault::kTooLarge, "trailer.virtual_size", trailer_at + kVirtualSizeAt,
                     t.virtual_bytes);
  }
  if (t.index_entries > kIndexEntriesMax) {
    return MakeFault(fault::kTooLarge, "trailer.index_size", trailer_at + kIndexSizeAt,
                     t.index_entries);
  }
  if (t.index_offset < kLsmtBlockBytes || t.index_offset > trailer_at) {
    return MakeFault(fault::kCorrupt, "trailer.index_offset", trailer_at + kIndexOffsetAt,
                     t.index_offset);
  }
  const std::uint64_t index_bytes = t.index_entries * sizeof(IndexEntry);
  if (index_bytes > trailer_at - t.index_offset) {
    return MakeFault(fault::kCorrupt, "trailer.index_size", trailer_at + kIndexSizeAt,
                     t.index_entries);
  }
  const UuidBytes none{};
  if (layer.header.uuid != t.uuid && layer.header.uuid != none && t.uuid != none) {
    return MakeFault(fault::kCorrupt, "trailer.uuid", trailer_at + kUuidAt);
  }
  layer.gap_bytes = trailer_at - t.index_offset - index_bytes;
  return CheckGap(content, layer.gap_bytes, t.index_offset + index_bytes);
}

}  // namespace

bool ParseUuid(const char* text, UuidBytes& out) noexcept {
  std::size_t digits = 0;
  for (std::size_t i = 0; i < kUuidText; ++i) {
    if (IsDash(i)) {
      if (text[i] != '-') return false;
      continue;
    }
    const int digit = HexDigit(text[i]);
    if (digit < 0) return false;
    std::uint8_t& byte = out[digits / 2];
    byte = static_cast<std::uint8_t>(digits % 2 == 0 ? digit << 4 : byte | digit);
    ++digits;
  }
  return true;
}

void FormatUuid(const UuidBytes& uuid, bool uppercase, char* out) noexcept {
  const char* digits = uppercase ? "0123456789ABCDEF" : "0123456789abcdef";
  std::size_t nibble = 0;
  for (std::size_t i = 0; i < kUuidText; ++i) {
    if (IsDash(i)) {
      out[i] = '-';
      continue;
    }
    const std::uint8_t byte = uuid[nibble / 2];
    out[i] = digits[nibble % 2 == 0 ? byte >> 4 : byte & 15];
    ++nibble;
  }
  out[kUuidText] = '\0';
}

LayerFault ParseLsmtBlock(ConstLayerBytes block, std::uint64_t where, LsmtHeader& out) noexcept {
  assert(block.size() == kLsmtBlockBytes);
  if (std::memcmp(block.data(), kMagic.data(), kMagic.size()) != 0) {
    return MakeFault(fault::kNotALayer, "magic", where, LoadField<std::uint64_t>(block, 0));
  }
  out.flags = LoadField<std::uint32_t>(block, kFlagsAt);
  out.index_offset = LoadField<std::uint64_t>(block, kIndexOffsetAt);
  out.index_entries = LoadField<std::uint64_t>(block, kIndexSizeAt);
  out.virtual_bytes = LoadField<std::uint64_t>(block, kVirtualSizeAt);
  if (!LoadUuid(block, kUuidAt, out.uuid)) {
    return MakeFault(fault::kCorrupt, "uuid", where + kUuidAt);
  }
  if (!LoadUuid(block, kParentUuidAt, out.parent_uuid)) {
    return MakeFault(fault::kCorrupt, "parent_uuid", where + kParentUuidAt);
  }
  std::memcpy(out.user_tag.data(), block.data() + kUserTagAt, kUserTagBytes);
  out.user_tag[kUserTagBytes] = '\0';
  return {};
}

void EncodeLsmtBlock(const LsmtHeader& header, LayerBytes block) noexcept {
  assert(block.size() == kLsmtBlockBytes);
  std::ranges::fill(block, std::byte{0});
  std::memcpy(block.data(), kMagic.data(), kMagic.size());
  StoreField<std::uint32_t>(block, kSizeAt, kStructBytes);
  StoreField(block, kFlagsAt, header.flags);
  StoreField(block, kIndexOffsetAt, header.index_offset);
  StoreField(block, kIndexSizeAt, header.index_entries);
  StoreField(block, kVirtualSizeAt, header.virtual_bytes);
  char text[kUuidText + 1];
  FormatUuid(header.uuid, true, text);
  std::memcpy(block.data() + kUuidAt, text, sizeof text);
  FormatUuid(header.parent_uuid, true, text);
  std::memcpy(block.data() + kParentUuidAt, text, sizeof text);
  StoreField<std::uint16_t>(block, kVersionAt, 0x0101);
  std::memcpy(block.data() + kUserTagAt, header.user_tag.data(), kUserTagBytes);
}

LayerFault ReadLsmt(ByteSource& content, LsmtLayer& out) noexcept {
  out.content_bytes = content.size();
  std::array<std::byte, kLsmtBlockBytes> block;
  if (content.size() < kLsmtBlockBytes) {
    return MakeFault(fault::kNotALayer, "size", 0, content.size());
  }
  if (auto f = content.Read(0, block); !f.ok()) return f;
  if (auto f = ParseLsmtBlock(block, 0, out.header); !f.ok()) return f;
  constexpr std::uint32_t kHeaderBits = lsmt_flag::kHeader | lsmt_flag::kData;
  if ((out.header.flags & kHeaderBits) != kHeaderBits) {
    return MakeFault(fault::kNotALayer, "header.flags", kFlagsAt, out.header.flags);
  }
  // Without a trailer: a layer that was never sealed, or one that lost its end.
  const bool sealed_header = (out.header.flags & lsmt_flag::kSealed) != 0;
  const char* no_trailer = sealed_header ? fault::kTruncated : fault::kUnsealed;
  if (content.size() < 2 * kLsmtBlockBytes) {
    return MakeFault(no_trailer, "trailer", content.size(), 0);
  }
  const std::uint64_t trailer_at = content.size() - kLsmtBlockBytes;
  if (auto f = content.Read(trailer_at, block); !f.ok()) return f;
  if (auto f = ParseLsmtBlock(block, trailer_at, out.trailer); !f.ok()) {
    return std::strcmp(f.kind, fault::kNotALayer) == 0
               ? MakeFault(no_trailer, "trailer.magic", trailer_at, f.value)
               : f;
  }
  constexpr std::uint32_t kTrailerBits = lsmt_flag::kData | lsmt_flag::kSealed;
  if ((out.trailer.flags & (kTrailerBits | lsmt_flag::kHeader)) != kTrailerBits) {
    return MakeFault(no_trailer, "trailer.flags", trailer_at + kFlagsAt, out.trailer.flags);
  }
  if (auto f = CheckTrailer(content, out); !f.ok()) return f;
  return ReadIndex(content, out);
}

LayerFault NormaliseIndex(std::vector<IndexEntry>& entries) noexcept {
  const auto by_offset = [](const IndexEntry& a, const IndexEntry& b) {
    return a.offset() < b.offset();
  };
  if (!std::ranges::is_sorted(entries, by_offset)) std::ranges::sort(entries, by_offset);
  std::vector<IndexEntry> out;
  out.reserve(entries.size());
  for (const IndexEntry& entry : entries) {
    if (entry.length() == 0) continue;
    if (out.empty()) {
      out.push_back(entry);
      continue;
    }
    IndexEntry& last = out.back();
    if (entry.offset() < last.end()) {
      return MakeFault(fault::kCorrupt, "overlapping segments", entry.offset() * kSectorBytes);
    }
    const bool joins = entry.offset() == last.end() && entry.zeroed() == last.zeroed() &&
                       (entry.zeroed() || entry.moffset() == last.moffset() + last.length());
    if (!joins) {
      out.push_back(entry);
      continue;
    }
    const std::uint64_t room = kSegmentSectorsMax - std::min(kSegmentSectorsMax, last.length());
    const std::uint64_t moved = std::min(room, entry.length());
    last = IndexEntry::Make(last.offset(), last.length() + moved, last.moffset(), last.zeroed());
    if (moved < entry.length()) {
      out.push_back(IndexEntry::Make(entry.offset() + moved, entry.length() - moved,
                                     entry.zeroed() ? entry.moffset() : entry.moffset() + moved,
                                     entry.zeroed()));
    }
  }
  const std::uint64_t padded = (out.size() + kIndexPadEntries - 1) / kIndexPadEntries;
  if (padded * kIndexPadEntries > kIndexEntriesMax) {
    return MakeFault(fault::kTooLarge, "index.entries", 0, out.size());
  }
  entries = std::move(out);
  return {};
}

}  // namespace varve
