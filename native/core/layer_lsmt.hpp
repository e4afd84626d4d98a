// LSMT: header, trailer and index of one layer (FORMAT.md section 1). Pure bytes, no files.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/layer_bytes.hpp"
#include "core/layer_fault.hpp"
#include "core/layer_source.hpp"

namespace varve {

inline constexpr std::uint64_t kSectorBytes = 512;
inline constexpr std::uint64_t kLsmtBlockBytes = 4096;       // header and trailer
inline constexpr std::uint64_t kFirstDataSector = 8;         // after the header
inline constexpr std::uint64_t kSegmentSectorsMax = 16376;   // largest page multiple below 2^14
inline constexpr std::uint64_t kIndexEntriesMax = 1'000'000;  // the reference's limit, with padding
inline constexpr std::uint64_t kIndexPadEntries = 256;
inline constexpr std::uint64_t kInvalidOffset = (1ull << 50) - 1;
inline constexpr std::uint64_t kVirtualBytesMax = (1ull << 53) - 1;  // exact in JavaScript
inline constexpr std::uint32_t kStackLayersMax = 255;

// 16 bytes of the UUID; all zero where there is none.
using UuidBytes = std::array<std::uint8_t, 16>;

// One index entry as stored. Units are 512-byte sectors; `tag` is 0 in files and the layer's
// position in a merged index.
struct IndexEntry {
  std::uint64_t word0 = 0;
  std::uint64_t word1 = 0;

  static constexpr std::uint64_t kZeroedBit = 1ull << 55;

  static IndexEntry Make(std::uint64_t offset, std::uint64_t length, std::uint64_t moffset,
                         bool zeroed, std::uint8_t tag = 0) noexcept {
    return {offset | length << 50,
            moffset | (zeroed ? kZeroedBit : 0) | static_cast<std::uint64_t>(tag) << 56};
  }
  std::uint64_t offset() const noexcept { return word0 & kInvalidOffset; }
  std::uint64_t length() const noexcept { return word0 >> 50; }
  std::uint64_t end() const noexcept { return offset() + length(); }
  std::uint64_t moffset() const noexcept { return word1 & (kZeroedBit - 1); }
  bool zeroed() const noexcept { return (word1 & kZeroedBit) != 0; }
  std::uint8_t tag() const noexcept { return static_cast<std::uint8_t>(word1 >> 56); }
};
static_assert(sizeof(IndexEntry) == 16);

struct LsmtHeader {
  std::uint32_t flags = 0;
  std::uint64_t index_offset = 0;   // bytes
  std::uint64_t index_entries = 0;  // padding included
  std::uint64_t virtual_bytes = 0;
  UuidBytes uuid{};
  UuidBytes parent_uuid{};
  std::array<char, 257> user_tag{};  // NUL-terminated
};

namespace lsmt_flag {
inline constexpr std::uint32_t kHeader = 1;
inline constexpr std::uint32_t kData = 2;
inline constexpr std::uint32_t kSealed = 4;
inline constexpr std::uint32_t kSparse = 16;
}  // namespace lsmt_flag

struct LsmtLayer {
  LsmtHeader header;
  LsmtHeader trailer;
  std::uint64_t content_bytes = 0;  // header to trailer
  std::uint64_t gap_bytes = 0;      // between index and trailer
  std::vector<IndexEntry> entries;  // valid, non-empty, sorted, not overlapping
};

// Parses a block of 4096 bytes; `where` is its offset, for the fault.
LayerFault ParseLsmtBlock(ConstLayerBytes block, std::uint64_t where, LsmtHeader& out) noexcept;
// Fills a block of 4096 bytes.
void EncodeLsmtBlock(const LsmtHeader& header, LayerBytes block) noexcept;

// Reads and checks header, trailer and index. Allocates at most 16 bytes for each index entry
// that the content really has room for, 16 MB at most.
LayerFault ReadLsmt(ByteSource& content, LsmtLayer& out) noexcept;

// Sorts, joins neighbours and splits at kSegmentSectorsMax. Fault on overlap or too many entries.
LayerFault NormaliseIndex(std::vector<IndexEntry>& entries) noexcept;

// `text` has 36 characters: 8-4-4-4-12 hex digits of either case.
bool ParseUuid(const char* text, UuidBytes& out) noexcept;
// Writes 36 characters and a NUL.
void FormatUuid(const UuidBytes& uuid, bool uppercase, char* out) noexcept;

}  // namespace varve
