// Compresses a batch into ZFile blocks. One per thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/layer_reader.hpp"
#include "core/layer_zfile.hpp"

struct ZSTD_CCtx_s;

namespace varve {

class BlockEncoder {
 public:
  BlockEncoder(Codec codec, std::uint32_t block_bytes, bool verify) noexcept
      : codec_(codec), block_bytes_(block_bytes), verify_(verify) {}
  ~BlockEncoder();
  BlockEncoder(const BlockEncoder&) = delete;
  BlockEncoder& operator=(const BlockEncoder&) = delete;

  // Most bytes that `length` bytes of content can take, CRCs included.
  static std::uint64_t Bound(Codec codec, std::uint32_t block_bytes, std::uint64_t length) noexcept;

  // Stores one block; returns its stored length, or 0 where `out` is too small.
  std::uint32_t Encode(ConstLayerBytes block, LayerBytes out) noexcept;

  // Stores the data rows, one after another, as blocks; the last is padded with zeros. Returns
  // bytes used in `out`; `lengths` gets the stored length of each block. UINT64_MAX: no room.
  std::uint64_t EncodeRows(std::span<const LayerRow> rows, ConstLayerBytes slab, LayerBytes out,
                           std::vector<std::uint32_t>& lengths) noexcept;

 private:
  Codec codec_;
  std::uint32_t block_bytes_;
  bool verify_;
  ZSTD_CCtx_s* zstd_ = nullptr;
  std::vector<std::byte> gather_;
};

}  // namespace varve
