// ZFile: compressed blocks with a jump table around a layer (FORMAT.md section 2).
#pragma once

#include <cstdint>
#include <vector>

#include "core/layer_bytes.hpp"
#include "core/layer_fault.hpp"
#include "core/layer_source.hpp"

namespace varve {

inline constexpr std::uint64_t kZFileHeaderBytes = 512;
inline constexpr std::uint32_t kZFileBlockBytesMin = 4096;
inline constexpr std::uint32_t kZFileBlockBytesMax = 65536;
inline constexpr std::uint32_t kZFileCrcSeed = 100007;
inline constexpr std::uint32_t kZFileCrcBytes = 4;
inline constexpr std::uint64_t kZFileGroupBlocks = 1024;  // blocks that share one 64-bit base

enum class Codec : std::uint8_t { kNone = 0, kLz4 = 1, kZstd = 2 };

namespace zfile_flag {
inline constexpr std::uint64_t kHeader = 1;
inline constexpr std::uint64_t kData = 2;
inline constexpr std::uint64_t kSealed = 4;
inline constexpr std::uint64_t kOverwritten = 8;
inline constexpr std::uint64_t kDigest = 16;
}  // namespace zfile_flag

struct ZFileHeader {
  std::uint64_t flags = 0;
  std::uint64_t index_offset = 0;  // bytes, of the jump table
  std::uint64_t index_entries = 0;
  std::uint64_t original_bytes = 0;
  std::uint32_t index_crc = 0;
  std::uint32_t block_bytes = kZFileBlockBytesMin;
  Codec codec = Codec::kLz4;
  bool verify = true;
};

// Where each block lies. Block i starts at bases[i / 1024] + starts[i] and ends where i + 1
// starts; starts has one entry more than there are blocks. A view: its owner keeps the arrays.
struct ZFileTable {
  const std::uint64_t* bases = nullptr;
  const std::uint32_t* starts = nullptr;
  std::uint64_t blocks = 0;
  std::uint64_t original_bytes = 0;
  std::uint32_t block_bytes = 0;
  Codec codec = Codec::kNone;
  bool verify = false;

  std::uint64_t Start(std::uint64_t block) const noexcept {
    return bases[block / kZFileGroupBlocks] + starts[block];
  }
};

struct ZFile {
  ZFileHeader header;
  std::uint64_t file_bytes = 0;
  std::vector<std::uint64_t> bases;
  std::vector<std::uint32_t> starts;

  ZFileTable Table() const noexcept;
};

bool IsZFile(ConstLayerBytes first_bytes) noexcept;  // needs 24 bytes
// Parses 512 bytes at `where` and checks the digest.
LayerFault ParseZFileHeader(ConstLayerBytes block, std::uint64_t where, ZFileHeader& out) noexcept;
void EncodeZFileHeader(const ZFileHeader& header, LayerBytes block) noexcept;
// Reads header or trailer and the jump table; checks all against the file's size. Allocates
// 4.01 bytes a block, and only for blocks whose table entries were read and checked.
LayerFault ReadZFile(ByteSource& file, ZFile& out) noexcept;
// For verify: header and trailer say the same.
LayerFault CheckZFileTrailer(ByteSource& file, const ZFile& zfile) noexcept;

}  // namespace varve
