#include "core/layer_zfile.hpp"

#include <algorithm>
#include <array>
#include <bit>

#include "core/crc32c.hpp"

namespace varve {
namespace {

constexpr char kMagic[] = "ZFile\0\1\0tuji.yyf@Alibaba";
constexpr std::size_t kMagicBytes = 24;
constexpr std::uint32_t kStructBytes = 96;
constexpr std::size_t kSizeAt = 24;
constexpr std::size_t kDigestAt = 28;
constexpr std::size_t kFlagsAt = 32;
constexpr std::size_t kIndexOffsetAt = 40;
constexpr std::size_t kIndexSizeAt = 48;
constexpr std::size_t kOriginalAt = 56;
constexpr std::size_t kIndexCrcAt = 64;
constexpr std::size_t kBlockBytesAt = 72;
constexpr std::size_t kCodecAt = 76;
constexpr std::size_t kUseDictAt = 78;
constexpr std::size_t kDictBytesAt = 84;
constexpr std::size_t kVerifyAt = 88;
constexpr std::uint64_t kOriginalBytesMax = (1ull << 53) - 1;

#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
constexpr bool kChecksCrc = false;  // so that the fuzzer gets past them
#else
constexpr bool kChecksCrc = true;
#endif

std::uint32_t HeaderDigest(ConstLayerBytes block) noexcept {
  std::array<std::byte, kZFileHeaderBytes> copy;
  std::ranges::copy(block, copy.begin());
  StoreField<std::uint32_t>(copy, kDigestAt, 0);
  return Crc32c(0, copy);
}

LayerFault CheckFields(const ZFileHeader& h, ConstLayerBytes block, std::uint64_t where) noexcept {
  if (!std::has_single_bit(h.block_bytes) || h.block_bytes < kZFileBlockBytesMin ||
      h.block_bytes > kZFileBlockBytesMax) {
    return MakeFault(fault::kUnsupported, "zfile.block_size", where + kBlockBytesAt,
                     h.block_bytes);
  }
  if (h.codec != Codec::kLz4 && h.codec != Codec::kZstd) {
    return MakeFault(fault::kUnsupported, "zfile.algorithm", where + kCodecAt,
                     static_cast<std::uint64_t>(h.codec));
  }
  const auto dict_bytes = LoadField<std::uint32_t>(block, kDictBytesAt);
  if (block[kUseDictAt] != std::byte{0} || dict_bytes != 0) {
    return MakeFault(fault::kUnsupported, "zfile.dictionary", where + kUseDictAt, dict_bytes);
  }
  return {};
}

// The table is sound for this file: every block takes room, all end where the table starts.
LayerFault CheckPlace(const ZFileHeader& h, std::uint64_t where, std::uint64_t size) noexcept {
  if (h.original_bytes > kOriginalBytesMax) {
    return MakeFault(fault::kTooLarge, "zfile.original_file_size", where + kOriginalAt,
                     h.original_bytes);
  }
  const std::uint64_t blocks =
      h.original_bytes / h.block_bytes + (h.original_bytes % h.block_bytes != 0 ? 1 : 0);
  if (h.index_entries != blocks) {
    return MakeFault(fault::kCorrupt, "zfile.index_size", where + kIndexSizeAt, h.index_entries);
  }
  const std::uint64_t table_end = size - kZFileHeaderBytes;
  if (h.index_offset < kZFileHeaderBytes || h.index_offset > table_end) {
    return MakeFault(fault::kTruncated, "zfile.index_offset", where + kIndexOffsetAt,
                     h.index_offset);
  }
  if (blocks > (table_end - h.index_offset) / 4) {
    return MakeFault(fault::kTruncated, "zfile.index_size", where + kIndexSizeAt, blocks);
  }
  if (h.index_offset + blocks * 4 != table_end) {
    return MakeFault(fault::kTrailingBytes, "zfile.end",
                     h.index_offset + blocks * 4 + kZFileHeaderBytes, size);
  }
  return {};
}

LayerFault ReadTable(ByteSource& file, ZFile& z) noexcept {
  constexpr std::uint64_t kPiece = 16384;
  std::vector<std::uint32_t> piece(std::min(kPiece, z.header.index_entries));
  const std::uint32_t crc_bytes = z.header.verify ? kZFileCrcBytes : 0;
  std::uint64_t at = kZFileHeaderBytes;
  std::uint32_t crc = 0;
  for (std::uint64_t first = 0; first < z.header.index_entries; first += kPiece) {
    const std::uint64_t count = std::min(kPiece, z.header.index_entries - first);
    const std::uint64_t where = z.header.index_offset + first * 4;
    const auto bytes = std::as_writable_bytes(std::span(piece).first(count));
    if (auto f = file.Read(where, bytes); !f.ok()) return f;
    crc = Crc32c(crc, bytes);
    for (std::uint64_t i = 0; i < count; ++i) {
      if ((first + i) % kZFileGroupBlocks == 0) z.bases.push_back(at);
      z.starts.push_back(static_cast<std::uint32_t>(at - z.bases.back()));
      // Neither codec needs twice a block's bytes for a block.
      if (piece[i] <= crc_bytes || piece[i] > 2 * z.header.block_bytes ||
          piece[i] > z.header.index_offset - at) {
        return MakeFault(fault::kCorrupt, "zfile.jump-table", where + i * 4, piece[i]);
      }
      at += piece[i];
    }
  }
  if (z.header.index_entries % kZFileGroupBlocks == 0) z.bases.push_back(at);
  z.starts.push_back(static_cast<std::uint32_t>(at - z.bases.back()));
  if (kChecksCrc && crc != z.header.index_crc) {
    return MakeFault(fault::kChecksum, "zfile.index_crc", z.header.index_offset, crc);
  }
  if (at != z.header.index_offset) {
    return MakeFault(fault::kCorrupt, "zfile.jump-table.sum", z.header.index_offset, at);
  }
  return {};
}

}  // namespace

ZFileTable ZFile::Table() const noexcept {
  return {.bases = bases.data(),
          .starts = starts.data(),
          .blocks = header.index_entries,
          .original_bytes = header.original_bytes,
          .block_bytes = header.block_bytes,
          .codec = header.codec,
          .verify = header.verify};
}

bool IsZFile(ConstLayerBytes first_bytes) noexcept {
  return first_bytes.size() >= kMagicBytes &&
         std::memcmp(first_bytes.data(), kMagic, kMagicBytes) == 0;
}

LayerFault ParseZFileHeader(ConstLayerBytes block, std::uint64_t where,
                            ZFileHeader& out) noexcept {
  assert(block.size() == kZFileHeaderBytes);
  if (!IsZFile(block)) {
    return MakeFault(fault::kNotALayer, "zfile.magic", where, LoadField<std::uint64_t>(block, 0));
  }
  out.flags = LoadField<std::uint64_t>(block, kFlagsAt);
  const auto digest = LoadField<std::uint32_t>(block, kDigestAt);
  // A digest that is there but not announced is a flipped flag.
  const bool has_digest = (out.flags & zfile_flag::kDigest) != 0 || digest != 0;
  if (kChecksCrc && has_digest && HeaderDigest(block) != digest) {
    return MakeFault(fault::kChecksum, "zfile.header_digest", where + kDigestAt, digest);
  }
  out.index_offset = LoadField<std::uint64_t>(block, kIndexOffsetAt);
  out.index_entries = LoadField<std::uint64_t>(block, kIndexSizeAt);
  out.original_bytes = LoadField<std::uint64_t>(block, kOriginalAt);
  out.index_crc = LoadField<std::uint32_t>(block, kIndexCrcAt);
  out.block_bytes = LoadField<std::uint32_t>(block, kBlockBytesAt);
  out.codec = static_cast<Codec>(LoadField<std::uint8_t>(block, kCodecAt));
  out.verify = block[kVerifyAt] != std::byte{0};
  return CheckFields(out, block, where);
}

void EncodeZFileHeader(const ZFileHeader& header, LayerBytes block) noexcept {
  assert(block.size() == kZFileHeaderBytes);
  std::ranges::fill(block, std::byte{0});
  std::memcpy(block.data(), kMagic, kMagicBytes);
  StoreField(block, kSizeAt, kStructBytes);
  StoreField(block, kFlagsAt, header.flags);
  StoreField(block, kIndexOffsetAt, header.index_offset);
  StoreField(block, kIndexSizeAt, header.index_entries);
  StoreField(block, kOriginalAt, header.original_bytes);
  StoreField(block, kIndexCrcAt, header.index_crc);
  StoreField(block, kBlockBytesAt, header.block_bytes);
  StoreField(block, kCodecAt, static_cast<std::uint8_t>(header.codec));
  StoreField<std::uint8_t>(block, kVerifyAt, header.verify ? 1 : 0);
  StoreField(block, kDigestAt, Crc32c(0, block));
}

LayerFault ReadZFile(ByteSource& file, ZFile& out) noexcept {
  out.file_bytes = file.size();
  if (file.size() < 2 * kZFileHeaderBytes) {
    return MakeFault(fault::kTruncated, "zfile", 0, file.size());
  }
  std::array<std::byte, kZFileHeaderBytes> block;
  std::uint64_t where = 0;
  if (auto f = file.Read(0, block); !f.ok()) return f;
  if (auto f = ParseZFileHeader(block, 0, out.header); !f.ok()) return f;
  if ((out.header.flags & zfile_flag::kHeader) == 0) {
    return MakeFault(fault::kCorrupt, "zfile.flags", kFlagsAt, out.header.flags);
  }
  if ((out.header.flags & zfile_flag::kOverwritten) == 0) {
    where = file.size() - kZFileHeaderBytes;
    if (auto f = file.Read(where, block); !f.ok()) return f;
    if (auto f = ParseZFileHeader(block, where, out.header); !f.ok()) {
      return std::strcmp(f.kind, fault::kNotALayer) == 0
                 ? MakeFault(fault::kTruncated, "zfile.trailer", where, f.value)
                 : f;
    }
    constexpr std::uint64_t kBits = zfile_flag::kHeader | zfile_flag::kData | zfile_flag::kSealed;
    if ((out.header.flags & kBits) != (zfile_flag::kData | zfile_flag::kSealed)) {
      return MakeFault(fault::kTruncated, "zfile.trailer.flags", where + kFlagsAt,
                       out.header.flags);
    }
  }
  if (auto f = CheckPlace(out.header, where, file.size()); !f.ok()) return f;
  return ReadTable(file, out);
}

LayerFault CheckZFileTrailer(ByteSource& file, const ZFile& zfile) noexcept {
  std::array<std::byte, kZFileHeaderBytes> block;
  const std::uint64_t where = file.size() - kZFileHeaderBytes;
  if (auto f = file.Read(where, block); !f.ok()) return f;
  ZFileHeader trailer;
  if (auto f = ParseZFileHeader(block, where, trailer); !f.ok()) return f;
  const ZFileHeader& h = zfile.header;
  const bool same = trailer.index_offset == h.index_offset &&
                    trailer.index_entries == h.index_entries &&
                    trailer.original_bytes == h.original_bytes &&
                    trailer.index_crc == h.index_crc && trailer.block_bytes == h.block_bytes &&
                    trailer.codec == h.codec && trailer.verify == h.verify;
  if (!same) return MakeFault(fault::kCorrupt, "zfile.trailer", where);
  return {};
}

}  // namespace varve
