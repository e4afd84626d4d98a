#include "core/layer_pack.hpp"

#include <unistd.h>

#include "core/layer_index.hpp"

namespace varve {
namespace {

constexpr std::uint32_t kClosedBit = 1u << 31;

std::uint64_t Align8(std::uint64_t value) noexcept { return (value + 7) & ~7ull; }

bool Within(std::uint64_t at, std::uint64_t count, std::uint64_t each,
            std::uint64_t total) noexcept {
  return at % 8 == 0 && at <= total && count <= (total - at) / each;
}

}  // namespace

LayerFault OpenStack(const std::vector<std::string>& paths, OpenedStack& out) noexcept {
  if (paths.empty() || paths.size() > kStackLayersMax) {
    return MakeFault(fault::kTooLarge, "stack.layers", 0, paths.size());
  }
  IndexMerger merger;
  out.layers.resize(paths.size());
  for (std::uint32_t i = 0; i < paths.size(); ++i) {
    OpenedLayer& layer = out.layers[i];
    if (auto f = OpenLayer(paths[i], layer); !f.ok()) {
      f.layer = i;
      out = {};
      return f;
    }
    LsmtLayer& lsmt = layer.parsed.lsmt;
    out.layer_entries.push_back(lsmt.entries.size());
    merger.Add(std::move(lsmt.entries), static_cast<std::uint8_t>(i));
    if (lsmt.trailer.virtual_bytes != 0) out.virtual_bytes = lsmt.trailer.virtual_bytes;
  }
  out.entries = merger.Finish();
  return {};
}

std::uint64_t PackBytes(const OpenedStack& stack) noexcept {
  std::uint64_t total = sizeof(PackHeader) + stack.layers.size() * sizeof(PackLayer) +
                        stack.entries.size() * sizeof(IndexEntry);
  for (const OpenedLayer& layer : stack.layers) {
    total += layer.parsed.zfile.bases.size() * 8;
    total += Align8(layer.parsed.zfile.starts.size() * 4);
  }
  return total;
}

void FillPack(OpenedStack& stack, LayerBytes pack) noexcept {
  assert(pack.size() == PackBytes(stack));
  PackHeader header{};
  header.magic = kPackMagic;
  header.layer_count = stack.layers.size();
  header.entry_count = stack.entries.size();
  header.entries_at = sizeof(PackHeader) + stack.layers.size() * sizeof(PackLayer);
  header.virtual_bytes = stack.virtual_bytes;
  header.total_bytes = pack.size();
  std::uint64_t at = header.entries_at;
  const auto append = [&](const auto& items) {
    const std::uint64_t start = at;
    const std::uint64_t size = items.size() * sizeof(items[0]);
    if (size != 0) std::memcpy(pack.data() + at, items.data(), size);
    at = Align8(at + size);
    return start;
  };
  append(stack.entries);
  for (std::size_t i = 0; i < stack.layers.size(); ++i) {
    OpenedLayer& opened = stack.layers[i];
    const ParsedLayer& parsed = opened.parsed;
    PackLayer layer{};
    layer.base = parsed.body.offset;
    layer.body_bytes = parsed.body.size;
    layer.content_bytes = parsed.lsmt.content_bytes;
    if (parsed.compressed) {
      layer.codec = static_cast<std::uint8_t>(parsed.zfile.header.codec);
      layer.verify = parsed.zfile.header.verify ? 1 : 0;
      layer.block_bytes = parsed.zfile.header.block_bytes;
      layer.blocks = parsed.zfile.header.index_entries;
      layer.bases_at = append(parsed.zfile.bases);
      layer.starts_at = append(parsed.zfile.starts);
    }
    layer.fd = opened.fd.Release();
    std::memcpy(pack.data() + sizeof(PackHeader) + i * sizeof(PackLayer), &layer, sizeof layer);
  }
  std::memcpy(pack.data(), &header, sizeof header);
}

bool PackView::Parse(LayerBytes bytes, PackView& out) noexcept {
  if (bytes.size() < sizeof(PackHeader)) return false;
  // SAFETY: aligned below; the caller keeps the memory.
  if (reinterpret_cast<std::uintptr_t>(bytes.data()) % 8 != 0) return false;
  out.base_ = bytes.data();
  out.header_ = reinterpret_cast<PackHeader*>(bytes.data());
  const PackHeader& h = *out.header_;
  if (h.magic != kPackMagic || h.total_bytes != bytes.size()) return false;
  if (!Within(sizeof(PackHeader), h.layer_count, sizeof(PackLayer), bytes.size())) return false;
  if (!Within(h.entries_at, h.entry_count, sizeof(IndexEntry), bytes.size())) return false;
  out.layers_ = {reinterpret_cast<const PackLayer*>(out.base_ + sizeof(PackHeader)),
                 h.layer_count};
  out.entries_ = {reinterpret_cast<const IndexEntry*>(out.base_ + h.entries_at), h.entry_count};
  for (const PackLayer& layer : out.layers_) {
    if (layer.codec == 0) continue;
    const std::uint64_t groups = layer.blocks / kZFileGroupBlocks + 1;
    if (!Within(layer.bases_at, groups, 8, bytes.size())) return false;
    if (!Within(layer.starts_at, layer.blocks + 1, 4, bytes.size())) return false;
  }
  return true;
}

ZFileTable PackView::Table(const PackLayer& layer) const noexcept {
  // SAFETY: Parse checked both arrays against the pack's length.
  return {.bases = reinterpret_cast<const std::uint64_t*>(base_ + layer.bases_at),
          .starts = reinterpret_cast<const std::uint32_t*>(base_ + layer.starts_at),
          .blocks = layer.blocks,
          .original_bytes = layer.content_bytes,
          .block_bytes = layer.block_bytes,
          .codec = static_cast<Codec>(layer.codec),
          .verify = layer.verify != 0};
}

bool PackView::Enter() const noexcept {
  const std::uint32_t old = __atomic_fetch_add(&header_->state, 1, __ATOMIC_ACQ_REL);
  if ((old & kClosedBit) == 0) return true;
  Leave();
  return false;
}

void PackView::Leave() const noexcept {
  const std::uint32_t old = __atomic_fetch_sub(&header_->state, 1, __ATOMIC_ACQ_REL);
  if (old == (kClosedBit | 1)) CloseDescriptors();
}

void PackView::Close() const noexcept {
  const std::uint32_t old = __atomic_fetch_or(&header_->state, kClosedBit, __ATOMIC_ACQ_REL);
  if ((old & ~kClosedBit) == 0) CloseDescriptors();
}

bool PackView::closed() const noexcept {
  return (__atomic_load_n(&header_->state, __ATOMIC_ACQUIRE) & kClosedBit) != 0;
}

void PackView::CloseDescriptors() const noexcept {
  if (__atomic_exchange_n(&header_->fds_closed, 1, __ATOMIC_ACQ_REL) != 0) return;
  for (const PackLayer& layer : layers_) ::close(layer.fd);
}

}  // namespace varve
