#include "core/layer_reader.hpp"

#include <algorithm>
#include <cstring>

#include "core/layer_index.hpp"

namespace varve {
namespace {

// Keeps the descriptors open for one operation.
class Entered {
 public:
  explicit Entered(const PackView& pack) noexcept : pack_(pack), ok_(pack.Enter()) {}
  ~Entered() {
    if (ok_) pack_.Leave();
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  explicit operator bool() const noexcept { return ok_; }

 private:
  const PackView& pack_;
  bool ok_;
};

LayerFault Closed() noexcept { return MakeFault(fault::kClosed, "stack", 0); }

}  // namespace

std::unique_ptr<BlockDecoder> StackReader::TakeDecoder() {
  const std::lock_guard lock(mutex_);
  if (decoders_.empty()) return std::make_unique<BlockDecoder>();
  auto decoder = std::move(decoders_.back());
  decoders_.pop_back();
  return decoder;
}

void StackReader::GiveDecoder(std::unique_ptr<BlockDecoder> decoder) {
  const std::lock_guard lock(mutex_);
  decoders_.push_back(std::move(decoder));
}

LayerFault StackReader::ReadContent(std::uint32_t position, std::uint64_t offset,
                                    LayerBytes out) noexcept {
  const PackLayer& layer = pack_.layers()[position];
  FileSource body(layer.fd, layer.base, layer.body_bytes);
  LayerFault f;
  if (layer.codec == 0) {
    f = body.Read(offset, out);
  } else {
    const ZFileTable table = pack_.Table(layer);
    auto decoder = TakeDecoder();
    f = ZFileSource(body, table, *decoder, &cache_, position).Read(offset, out);
    GiveDecoder(std::move(decoder));
  }
  f.layer = position;
  return f;
}

LayerFault StackReader::Read(std::uint64_t offset, LayerBytes out) noexcept {
  const Entered entered(pack_);
  if (!entered) return Closed();
  return ReadInside(offset, out);
}

LayerFault StackReader::ReadInside(std::uint64_t offset, LayerBytes out) noexcept {
  const auto entries = pack_.entries();
  const std::uint64_t end = offset + out.size();
  std::uint64_t at = offset;
  for (std::size_t i = FindEntry(entries, offset / kSectorBytes); i < entries.size(); ++i) {
    const std::uint64_t start = entries[i].offset() * kSectorBytes;
    if (start >= end) break;
    if (start > at) std::memset(out.data() + (at - offset), 0, start - at);
    at = std::max(at, start);
    const IndexEntry& first = entries[i];
    // Neighbours that continue in the same layer are one read.
    while (i + 1 < entries.size() && entries[i].end() * kSectorBytes < end &&
           entries[i + 1].offset() == entries[i].end() &&
           entries[i + 1].tag() == first.tag() && !first.zeroed() && !entries[i + 1].zeroed() &&
           entries[i + 1].moffset() == entries[i].moffset() + entries[i].length()) {
      ++i;
    }
    const std::uint64_t stop = std::min(end, entries[i].end() * kSectorBytes);
    const LayerBytes part = out.subspan(at - offset, stop - at);
    if (first.zeroed()) {
      std::memset(part.data(), 0, part.size());
    } else {
      const std::uint64_t source = first.moffset() * kSectorBytes + (at - start);
      if (auto f = ReadContent(first.tag(), source, part); !f.ok()) return f;
    }
    at = stop;
  }
  if (at < end) std::memset(out.data() + (at - offset), 0, end - at);
  return {};
}

LayerFault StackReader::ReadLayer(std::uint32_t position, std::uint64_t offset,
                                  LayerBytes out) noexcept {
  const Entered entered(pack_);
  if (!entered) return Closed();
  return ReadContent(position, offset, out);
}

LayerFault StackReader::ReadRows(std::span<const LayerRow> rows, LayerBytes slab) noexcept {
  const Entered entered(pack_);
  if (!entered) return Closed();
  for (const LayerRow& row : rows) {
    if (row.slab_offset == kZeroedRow) continue;
    const auto f = ReadInside(row.image_offset, slab.subspan(row.slab_offset, row.length));
    if (!f.ok()) return f;
  }
  return {};
}

std::vector<LayerRow> StackReader::NextRows(RowCursor& cursor, std::uint64_t bytes_max,
                                            std::size_t rows_max, bool with_zeroed) const {
  const auto entries = pack_.entries();
  const std::uint64_t virtual_bytes = pack_.virtual_bytes();
  std::vector<LayerRow> rows;
  std::uint64_t used = 0;
  while (cursor.entry < entries.size() && used < bytes_max && rows.size() < rows_max) {
    const IndexEntry& entry = entries[cursor.entry];
    const std::uint64_t start = std::max(cursor.sector, entry.offset()) * kSectorBytes;
    std::uint64_t end = std::min(entry.end() * kSectorBytes, virtual_bytes);
    const bool skip = start >= end || (entry.zeroed() && !with_zeroed);
    if (!skip) {
      if (!entry.zeroed()) end = std::min(end, start + (bytes_max - used));
      rows.push_back({start, end - start, entry.zeroed() ? kZeroedRow : used});
      if (!entry.zeroed()) used += end - start;
    }
    if (!skip && end < entry.end() * kSectorBytes && end < virtual_bytes) {
      cursor.sector = end / kSectorBytes;
    } else {
      ++cursor.entry;
      cursor.sector = 0;
    }
  }
  return rows;
}

}  // namespace varve
