// Random and sequential reads of a ZFile's content: checks CRCs, decompresses, caches blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "core/layer_zfile.hpp"

struct ZSTD_DCtx_s;

namespace varve {

// Scratch of one reading thread. Use by one thread at a time.
class BlockDecoder {
 public:
  BlockDecoder() = default;
  ~BlockDecoder();
  BlockDecoder(const BlockDecoder&) = delete;
  BlockDecoder& operator=(const BlockDecoder&) = delete;

  // `stored` is the block as the jump table bounds it, CRC included; fills `out`, whose size is
  // the block's share of the content. `where` is the offset of `stored` in the file.
  LayerFault Decode(const ZFileTable& table, ConstLayerBytes stored, LayerBytes out,
                    std::uint64_t where) noexcept;

  LayerBytes Stored(std::size_t size);

 private:
  ZSTD_DCtx_s* zstd_ = nullptr;
  std::vector<std::byte> stored_;
  std::vector<std::byte> padded_;
};

// Decompressed blocks of all layers of one stack, at most `bytes_max`. Thread-safe.
class BlockCache {
 public:
  explicit BlockCache(std::uint64_t bytes_max) noexcept : bytes_max_(bytes_max) {}
  // Copies part of a cached block; false if it is not there.
  bool Get(std::uint64_t key, std::uint64_t offset, LayerBytes out) noexcept;
  void Put(std::uint64_t key, ConstLayerBytes block) noexcept;

 private:
  struct Slot {
    std::uint64_t key = 0;
    bool used = false;  // since the hand last passed
    std::vector<std::byte> bytes;
  };
  std::mutex mutex_;
  std::uint64_t bytes_max_;
  std::uint64_t bytes_ = 0;
  std::size_t hand_ = 0;
  std::vector<Slot> slots_;
  std::unordered_map<std::uint64_t, std::size_t> where_;
};

// The content of a ZFile. SAFETY: file, table arrays, decoder and cache outlive it.
class ZFileSource final : public ByteSource {
 public:
  ZFileSource(ByteSource& file, const ZFileTable& table, BlockDecoder& decoder,
              BlockCache* cache = nullptr, std::uint32_t layer = 0) noexcept
      : file_(file), table_(table), decoder_(decoder), cache_(cache), layer_(layer) {}
  std::uint64_t size() const noexcept override { return table_.original_bytes; }
  LayerFault Read(std::uint64_t offset, LayerBytes out) noexcept override;

 private:
  std::uint64_t BlockLength(std::uint64_t block) const noexcept;
  LayerFault ReadPart(std::uint64_t block, std::uint64_t from, LayerBytes out) noexcept;
  LayerFault ReadWhole(std::uint64_t first, std::uint64_t count, LayerBytes out) noexcept;

  ByteSource& file_;
  const ZFileTable& table_;
  BlockDecoder& decoder_;
  BlockCache* cache_;
  std::uint32_t layer_;
};

}  // namespace varve
