// A stack as one block of shared memory: what any thread needs to read it, and nothing else.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/layer_open.hpp"

namespace varve {

// One layer within a pack. Offsets `*_at` are bytes from the pack's start.
struct PackLayer {
  std::int32_t fd;
  std::uint8_t codec;
  std::uint8_t verify;
  std::uint16_t unused0;
  std::uint32_t block_bytes;
  std::uint32_t unused1;
  std::uint64_t base;            // bytes, of the body within the file
  std::uint64_t body_bytes;
  std::uint64_t content_bytes;   // LSMT header to trailer
  std::uint64_t blocks;
  std::uint64_t bases_at;
  std::uint64_t starts_at;
};
static_assert(sizeof(PackLayer) == 64);

struct PackHeader {
  std::uint64_t magic;
  std::uint32_t state;       // atomic: bit 31 closed, the rest readers at work
  std::uint32_t fds_closed;  // atomic: 1 once the descriptors are closed
  std::uint64_t layer_count;
  std::uint64_t entry_count;
  std::uint64_t entries_at;
  std::uint64_t virtual_bytes;
  std::uint64_t total_bytes;
  std::uint64_t unused;
};
static_assert(sizeof(PackHeader) == 64);

inline constexpr std::uint64_t kPackMagic = 0x31304b5056524156ull;

// Layers bottom first and their merged index, not yet in shared memory.
struct OpenedStack {
  std::vector<OpenedLayer> layers;
  std::vector<IndexEntry> entries;
  std::vector<std::uint64_t> layer_entries;  // index entries of each layer
  std::uint64_t virtual_bytes = 0;
};

// Opens each path, bottom first. On a fault nothing stays open, and fault.layer says which.
LayerFault OpenStack(const std::vector<std::string>& paths, OpenedStack& out) noexcept;

std::uint64_t PackBytes(const OpenedStack& stack) noexcept;
// Fills `pack` and gives the descriptors to it. SAFETY: 8-aligned, PackBytes long.
void FillPack(OpenedStack& stack, LayerBytes pack) noexcept;

// A pack as a reader sees it. SAFETY: the memory outlives the view.
class PackView {
 public:
  // False where the bytes are no pack: every offset is checked against their length.
  static bool Parse(LayerBytes bytes, PackView& out) noexcept;

  std::span<const IndexEntry> entries() const noexcept { return entries_; }
  std::span<const PackLayer> layers() const noexcept { return layers_; }
  std::uint64_t virtual_bytes() const noexcept { return header_->virtual_bytes; }
  ZFileTable Table(const PackLayer& layer) const noexcept;

  // Between a true Enter and its Leave the descriptors stay open.
  bool Enter() const noexcept;
  void Leave() const noexcept;
  // Refuses new readers; the last one out closes the descriptors.
  void Close() const noexcept;
  bool closed() const noexcept;

 private:
  void CloseDescriptors() const noexcept;

  std::byte* base_ = nullptr;
  PackHeader* header_ = nullptr;
  std::span<const PackLayer> layers_;
  std::span<const IndexEntry> entries_;
};

}  // namespace varve
