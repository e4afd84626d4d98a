#include "core/layer_reader.hpp"

#include <algorithm>
#include <array>
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
  FileSource body(layer.fd, layer.base, layer.body_bytes, &file_bytes_read_);
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

LayerFault StackReader::ReadFile(std::uint32_t position, std::uint64_t offset,
                                 LayerBytes out) noexcept {
  const Entered entered(pack_);
  if (!entered) return Closed();
  LayerFault f = FileSource(pack_.layers()[position].fd, 0, UINT64_MAX).Read(offset, out);
  f.layer = position;
  return f;
}

LayerFault StackReader::CheckTrailer(std::uint32_t position) noexcept {
  const Entered entered(pack_);
  const PackLayer& layer = pack_.layers()[position];
  if (!entered) return Closed();
  if (layer.codec == 0) return {};
  FileSource body(layer.fd, layer.base, layer.body_bytes);
  std::array<std::byte, kZFileHeaderBytes> block;
  ZFile zfile;
  LayerFault f = body.Read(0, block);
  if (f.ok()) f = ParseZFileHeader(block, 0, zfile.header);
  // Where only the trailer counts, the first header has no index fields to compare.
  const bool overwritten = (zfile.header.flags & zfile_flag::kOverwritten) != 0;
  if (f.ok() && overwritten) f = CheckZFileTrailer(body, zfile);
  f.layer = position;
  return f;
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

std::vector<LayerRow> StackReader::KeepShadowing(std::span<const LayerRow> rows) const {
  const auto entries = pack_.entries();
  std::vector<LayerRow> out;
  for (const LayerRow& row : rows) {
    if (row.slab_offset != kZeroedRow) {
      out.push_back(row);
      continue;
    }
    const std::uint64_t end = row.image_offset + row.length;
    std::size_t i = FindEntry(entries, row.image_offset / kSectorBytes);
    for (; i < entries.size() && entries[i].offset() * kSectorBytes < end; ++i) {
      if (entries[i].zeroed()) continue;
      const std::uint64_t from = std::max(row.image_offset, entries[i].offset() * kSectorBytes);
      const std::uint64_t to = std::min(end, entries[i].end() * kSectorBytes);
      LayerRow* last = out.empty() ? nullptr : &out.back();
      if (last != nullptr && last->slab_offset == kZeroedRow &&
          last->image_offset + last->length == from) {
        last->length += to - from;
      } else {
        out.push_back({from, to - from, kZeroedRow});
      }
    }
  }
  return out;
}

std::vector<LayerRow> StackReader::NextRows(RowCursor& cursor, std::uint64_t bytes_max,
                                            std::size_t rows_max, bool with_zeroed,
                                            bool past_end) const {
  const auto entries = pack_.entries();
  // No image is larger than kVirtualBytesMax: what lies further out is never uncovered.
  const std::uint64_t limit = past_end ? kVirtualBytesMax : pack_.virtual_bytes();
  std::vector<LayerRow> rows;
  std::uint64_t used = 0;
  while (cursor.entry < entries.size() && used < bytes_max && rows.size() < rows_max) {
    const IndexEntry& entry = entries[cursor.entry];
    const std::uint64_t start = std::max(cursor.sector, entry.offset()) * kSectorBytes;
    std::uint64_t end = std::min(entry.end() * kSectorBytes, limit);
    const bool skip = start >= end || (entry.zeroed() && !with_zeroed);
    if (!skip) {
      if (!entry.zeroed()) end = std::min(end, start + (bytes_max - used));
      rows.push_back({start, end - start, entry.zeroed() ? kZeroedRow : used});
      if (!entry.zeroed()) used += end - start;
    }
    if (!skip && end < entry.end() * kSectorBytes && end < limit) {
      cursor.sector = end / kSectorBytes;
    } else {
      ++cursor.entry;
      cursor.sector = 0;
    }
  }
  return rows;
}

}  // namespace varve
