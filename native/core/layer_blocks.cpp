#include "core/layer_blocks.hpp"

#include <lz4.h>
#include <zstd.h>

#include <algorithm>
#include <utility>

#include "core/crc32c.hpp"

namespace varve {
namespace {

// Stored bytes that one file read takes in when many blocks are wanted.
constexpr std::uint64_t kRunBytes = 256 << 10;
// Reads of fewer blocks than this go through the cache.
constexpr std::uint64_t kCachedBlocks = 4;

#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
constexpr bool kChecksCrc = false;
#else
constexpr bool kChecksCrc = true;
#endif

// Bytes decompressed into `out`, or -1.
std::int64_t Lz4(ConstLayerBytes in, LayerBytes out) noexcept {
  // SAFETY: char may alias std::byte; both lengths are at most 128 KiB.
  return LZ4_decompress_safe(reinterpret_cast<const char*>(in.data()),
                             reinterpret_cast<char*>(out.data()), static_cast<int>(in.size()),
                             static_cast<int>(out.size()));
}

std::int64_t Zstd(ZSTD_DCtx* context, ConstLayerBytes in, LayerBytes out) noexcept {
  const std::size_t got =
      ZSTD_decompressDCtx(context, out.data(), out.size(), in.data(), in.size());
  return ZSTD_isError(got) ? -1 : static_cast<std::int64_t>(got);
}

}  // namespace

BlockDecoder::~BlockDecoder() { ZSTD_freeDCtx(zstd_); }

LayerBytes BlockDecoder::Stored(std::size_t size) {
  if (stored_.size() < size) stored_.resize(size);
  return LayerBytes(stored_).first(size);
}

LayerFault BlockDecoder::Decode(const ZFileTable& table, ConstLayerBytes stored, LayerBytes out,
                                std::uint64_t where) noexcept {
  ConstLayerBytes packed = stored;
  if (table.verify) {
    packed = stored.first(stored.size() - kZFileCrcBytes);
    const auto crc = LoadField<std::uint32_t>(stored, packed.size());
    if (kChecksCrc && Crc32c(kZFileCrcSeed, packed) != crc) {
      return MakeFault(fault::kChecksum, "zfile.block", where, crc);
    }
  }
  if (table.codec == Codec::kZstd && zstd_ == nullptr) zstd_ = ZSTD_createDCtx();
  const auto unpack = [&](LayerBytes into) {
    return table.codec == Codec::kLz4 ? Lz4(packed, into) : Zstd(zstd_, packed, into);
  };
  std::int64_t got = -1;
  if (out.size() == table.block_bytes) {
    got = unpack(out);
  } else {
    // The last block: short, or padded to a whole one.
    padded_.resize(table.block_bytes);
    got = unpack(padded_);
    if (got == static_cast<std::int64_t>(table.block_bytes)) {
      got = static_cast<std::int64_t>(out.size());
    }
    if (got == static_cast<std::int64_t>(out.size())) {
      std::memcpy(out.data(), padded_.data(), out.size());
    }
  }
  if (got != static_cast<std::int64_t>(out.size())) {
    return MakeFault(fault::kCorrupt, "zfile.block", where, stored.size());
  }
  return {};
}

bool BlockCache::Get(std::uint64_t key, std::uint64_t offset, LayerBytes out) noexcept {
  const std::lock_guard lock(mutex_);
  const auto it = where_.find(key);
  if (it == where_.end()) return false;
  Slot& slot = slots_[it->second];
  if (offset > slot.bytes.size() || out.size() > slot.bytes.size() - offset) return false;
  slot.used = true;
  std::memcpy(out.data(), slot.bytes.data() + offset, out.size());
  return true;
}

void BlockCache::Put(std::uint64_t key, ConstLayerBytes block) noexcept {
  const std::lock_guard lock(mutex_);
  if (block.size() > bytes_max_ || where_.contains(key)) return;
  std::size_t place = slots_.size();
  if (bytes_ + block.size() > bytes_max_) {
    while (std::exchange(slots_[hand_].used, false)) hand_ = (hand_ + 1) % slots_.size();
    place = hand_;
    hand_ = (hand_ + 1) % slots_.size();
    where_.erase(slots_[place].key);
    bytes_ -= slots_[place].bytes.size();
  } else {
    slots_.emplace_back();
  }
  Slot& slot = slots_[place];
  slot.key = key;
  slot.bytes.assign(block.begin(), block.end());
  bytes_ += block.size();
  where_[key] = place;
}

std::uint64_t ZFileSource::BlockLength(std::uint64_t block) const noexcept {
  return std::min<std::uint64_t>(table_.block_bytes,
                                 table_.original_bytes - block * table_.block_bytes);
}

// Part of one block, by way of the cache.
LayerFault ZFileSource::ReadPart(std::uint64_t block, std::uint64_t from,
                                 LayerBytes out) noexcept {
  const std::uint64_t key = static_cast<std::uint64_t>(layer_) << 48 | block;
  if (cache_ != nullptr && cache_->Get(key, from, out)) return {};
  std::byte whole[kZFileBlockBytesMax];
  const LayerBytes decoded = LayerBytes(whole).first(BlockLength(block));
  if (auto f = ReadWhole(block, 1, decoded); !f.ok()) return f;
  std::memcpy(out.data(), decoded.data() + from, out.size());
  if (cache_ != nullptr) cache_->Put(key, decoded);
  return {};
}

// Whole blocks into `out`, which holds their content exactly.
LayerFault ZFileSource::ReadWhole(std::uint64_t first, std::uint64_t count,
                                  LayerBytes out) noexcept {
  std::uint64_t done = 0;
  for (std::uint64_t block = first; block < first + count;) {
    const std::uint64_t start = table_.Start(block);
    std::uint64_t end_block = block + 1;
    while (end_block < first + count && table_.Start(end_block + 1) - start <= kRunBytes) {
      ++end_block;
    }
    const LayerBytes stored = decoder_.Stored(table_.Start(end_block) - start);
    if (auto f = file_.Read(start, stored); !f.ok()) return f;
    for (; block < end_block; ++block) {
      const std::uint64_t at = table_.Start(block);
      const std::uint64_t length = BlockLength(block);
      const auto packed = stored.subspan(at - start, table_.Start(block + 1) - at);
      const auto f = decoder_.Decode(table_, packed, out.subspan(done, length), at);
      if (!f.ok()) return f;
      done += length;
    }
  }
  return {};
}

LayerFault ZFileSource::Read(std::uint64_t offset, LayerBytes out) noexcept {
  if (offset > size() || out.size() > size() - offset) {
    return MakeFault(fault::kTruncated, "content", offset, out.size());
  }
  const std::uint64_t block_bytes = table_.block_bytes;
  const bool cached = cache_ != nullptr && out.size() < kCachedBlocks * block_bytes;
  while (!out.empty()) {
    const std::uint64_t block = offset / block_bytes;
    const std::uint64_t from = offset % block_bytes;
    const std::uint64_t here = std::min<std::uint64_t>(BlockLength(block) - from, out.size());
    std::uint64_t taken = here;
    LayerFault f;
    if (cached || here < BlockLength(block)) {
      f = ReadPart(block, from, out.first(here));
    } else {
      // All blocks that are wanted whole.
      std::uint64_t end_block = block + 1;
      while (end_block < table_.blocks && taken + BlockLength(end_block) <= out.size()) {
        taken += BlockLength(end_block++);
      }
      f = ReadWhole(block, end_block - block, out.first(taken));
    }
    if (!f.ok()) return f;
    offset += taken;
    out = out.subspan(taken);
  }
  return {};
}

}  // namespace varve
