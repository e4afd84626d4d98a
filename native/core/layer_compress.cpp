#include "core/layer_compress.hpp"

#include <lz4.h>
#include <zstd.h>

#include <algorithm>

#include "core/crc32c.hpp"

namespace varve {
namespace {

constexpr int kZstdLevel = 3;

}  // namespace

BlockEncoder::~BlockEncoder() { ZSTD_freeCCtx(zstd_); }

std::uint64_t BlockEncoder::Bound(Codec codec, std::uint32_t block_bytes,
                                  std::uint64_t length) noexcept {
  const std::uint64_t blocks = (length + block_bytes - 1) / block_bytes;
  const std::uint64_t each =
      codec == Codec::kLz4
          ? static_cast<std::uint64_t>(LZ4_compressBound(static_cast<int>(block_bytes)))
          : ZSTD_compressBound(block_bytes);
  return blocks * (each + kZFileCrcBytes);
}

std::uint32_t BlockEncoder::Encode(ConstLayerBytes block, LayerBytes out) noexcept {
  const std::size_t crc_bytes = verify_ ? kZFileCrcBytes : 0;
  if (out.size() <= crc_bytes) return 0;
  const std::size_t room =
      std::min<std::size_t>(out.size() - crc_bytes, 2 * kZFileBlockBytesMax);
  std::size_t length = 0;
  if (codec_ == Codec::kLz4) {
    // SAFETY: char may alias std::byte; lengths are at most 128 KiB.
    const int got = LZ4_compress_default(reinterpret_cast<const char*>(block.data()),
                                         reinterpret_cast<char*>(out.data()),
                                         static_cast<int>(block.size()), static_cast<int>(room));
    if (got <= 0) return 0;
    length = static_cast<std::size_t>(got);
  } else {
    if (zstd_ == nullptr) zstd_ = ZSTD_createCCtx();
    length = ZSTD_compressCCtx(zstd_, out.data(), room, block.data(), block.size(), kZstdLevel);
    if (ZSTD_isError(length)) return 0;
  }
  if (verify_) StoreField(out, length, Crc32c(kZFileCrcSeed, out.first(length)));
  return static_cast<std::uint32_t>(length + crc_bytes);
}

std::uint64_t BlockEncoder::EncodeRows(std::span<const LayerRow> rows, ConstLayerBytes slab,
                                       LayerBytes out,
                                       std::vector<std::uint32_t>& lengths) noexcept {
  std::uint64_t used = 0;
  std::uint64_t gathered = 0;
  gather_.resize(block_bytes_);
  const auto store = [&](ConstLayerBytes block) {
    const std::uint32_t length = Encode(block, out.subspan(used));
    if (length == 0) return false;
    lengths.push_back(length);
    used += length;
    return true;
  };
  for (const LayerRow& row : rows) {
    if (row.slab_offset == kZeroedRow) continue;
    ConstLayerBytes left = slab.subspan(row.slab_offset, row.length);
    while (!left.empty()) {
      // Whole blocks straight from the slab; a block made of several rows by way of the copy.
      if (gathered == 0 && left.size() >= block_bytes_) {
        if (!store(left.first(block_bytes_))) return UINT64_MAX;
        left = left.subspan(block_bytes_);
        continue;
      }
      const std::size_t take = std::min<std::size_t>(left.size(), block_bytes_ - gathered);
      std::memcpy(gather_.data() + gathered, left.data(), take);
      gathered += take;
      left = left.subspan(take);
      if (gathered < block_bytes_) continue;
      if (!store(gather_)) return UINT64_MAX;
      gathered = 0;
    }
  }
  if (gathered > 0) {
    std::fill(gather_.begin() + static_cast<std::ptrdiff_t>(gathered), gather_.end(),
              std::byte{0});
    if (!store(gather_)) return UINT64_MAX;
  }
  return used;
}

}  // namespace varve
