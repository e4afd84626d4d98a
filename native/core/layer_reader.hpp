// Reads a stack's merged content: bytes, rows, comparisons. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "core/layer_blocks.hpp"
#include "core/layer_pack.hpp"

namespace varve {

// Slab offset of a row that is all zero and has no bytes.
inline constexpr std::uint64_t kZeroedRow = UINT64_MAX;

// One range of the image and where its bytes are in a slab.
struct LayerRow {
  std::uint64_t image_offset;  // bytes
  std::uint64_t length;        // bytes
  std::uint64_t slab_offset;   // bytes, or kZeroedRow
};
static_assert(sizeof(LayerRow) == 24);

// Where a walk over the merged index stands.
struct RowCursor {
  std::uint64_t entry = 0;
  std::uint64_t sector = 0;  // resume within the entry, image sector; 0 = its start
};

class StackReader {
 public:
  StackReader(const PackView& pack, std::uint64_t cache_bytes) noexcept
      : pack_(pack), cache_(cache_bytes) {}

  const PackView& pack() const noexcept { return pack_; }

  // Image bytes [offset, offset + out.size()); holes and what lies past the last segment are zero.
  LayerFault Read(std::uint64_t offset, LayerBytes out) noexcept;

  // Reads each row's image range to its slab offset. Rows lie inside the slab (checked by callers).
  LayerFault ReadRows(std::span<const LayerRow> rows, LayerBytes slab) noexcept;

  // Sets bit i of `equal` where page i of the rows, counted through them all, holds what the stack
  // reads there. Rows are whole pages. Bits start cleared. `cancel` may be null; non-zero stops.
  LayerFault Compare(std::span<const LayerRow> rows, ConstLayerBytes slab,
                     std::span<std::uint8_t> equal, const std::int32_t* cancel) noexcept;

  // The next rows of the merged index from `cursor`: data rows take slab offsets one after the
  // other up to `bytes_max`; zeroed rows only `with_zeroed`. Rows past the virtual size, which a
  // larger layer on top would uncover, only `past_end`.
  std::vector<LayerRow> NextRows(RowCursor& cursor, std::uint64_t bytes_max, std::size_t rows_max,
                                 bool with_zeroed, bool past_end) const;

  // Keeps of each zeroed row only what lies over data here; data rows stay as they are.
  std::vector<LayerRow> KeepShadowing(std::span<const LayerRow> rows) const;

  // Bytes read from files so far, stored form.
  std::uint64_t file_bytes_read() const noexcept { return file_bytes_read_; }

  // Whole-file bytes of layer `position`, wrapper included, for its digest.
  LayerFault ReadFile(std::uint32_t position, std::uint64_t offset, LayerBytes out) noexcept;
  // Header and trailer of a compressed layer say the same.
  LayerFault CheckTrailer(std::uint32_t position) noexcept;

  // Bytes of layer `position`'s content: inside its ZFile, LSMT header included.
  LayerFault ReadLayer(std::uint32_t position, std::uint64_t offset, LayerBytes out) noexcept;

 private:
  LayerFault ReadContent(std::uint32_t position, std::uint64_t offset, LayerBytes out) noexcept;
  struct Piece;
  std::unique_ptr<BlockDecoder> TakeDecoder();
  void GiveDecoder(std::unique_ptr<BlockDecoder> decoder);
  LayerFault ReadInside(std::uint64_t offset, LayerBytes out) noexcept;
  void AddPieces(const LayerRow& row, ConstLayerBytes slab, std::uint64_t first_page,
                 std::span<std::uint8_t> equal, std::vector<Piece>& pieces) noexcept;
  LayerFault ComparePieces(std::span<const Piece> pieces, LayerBytes scratch,
                           std::span<std::uint8_t> equal) noexcept;

  PackView pack_;
  std::atomic<std::uint64_t> file_bytes_read_{0};
  BlockCache cache_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<BlockDecoder>> decoders_;
};

}  // namespace varve
