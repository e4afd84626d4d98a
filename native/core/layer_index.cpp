#include "core/layer_index.hpp"

#include <algorithm>

namespace varve {

IndexEntry ClipEntry(const IndexEntry& entry, std::uint64_t from, std::uint64_t to) noexcept {
  const std::uint64_t start = std::max(entry.offset(), from);
  const std::uint64_t end = std::min(entry.end(), to);
  const std::uint64_t moved = entry.zeroed() ? 0 : start - entry.offset();
  return IndexEntry::Make(start, end - start, entry.moffset() + moved, entry.zeroed(),
                          entry.tag());
}

std::vector<IndexEntry> MergeIndexes(std::span<const IndexEntry> upper,
                                     std::span<const IndexEntry> lower) {
  std::vector<IndexEntry> out;
  out.reserve(upper.size() + lower.size());
  std::size_t u = 0;
  for (const IndexEntry& entry : lower) {
    std::uint64_t from = entry.offset();
    const std::uint64_t end = entry.end();
    // Uppers that end before this entry starts, then those that overlap it.
    while (u < upper.size() && upper[u].end() <= from) out.push_back(upper[u++]);
    while (u < upper.size() && upper[u].offset() < end) {
      if (upper[u].offset() > from) out.push_back(ClipEntry(entry, from, upper[u].offset()));
      from = std::max(from, upper[u].end());
      if (upper[u].end() > end) break;  // may overlap the next lower entry too
      out.push_back(upper[u++]);
    }
    if (from < end) out.push_back(ClipEntry(entry, from, end));
  }
  out.insert(out.end(), upper.begin() + static_cast<std::ptrdiff_t>(u), upper.end());
  return out;
}

void IndexMerger::Add(std::vector<IndexEntry> entries, std::uint8_t position) {
  for (IndexEntry& entry : entries) {
    entry.word1 = (entry.word1 & ~(0xffull << 56)) | static_cast<std::uint64_t>(position) << 56;
  }
  runs_.push_back(std::move(entries));
  while (runs_.size() > 1 && runs_[runs_.size() - 2].size() <= 2 * runs_.back().size()) MergeTop();
}

void IndexMerger::MergeTop() {
  std::vector<IndexEntry> merged = MergeIndexes(runs_.back(), runs_[runs_.size() - 2]);
  runs_.pop_back();
  runs_.back() = std::move(merged);
}

std::vector<IndexEntry> IndexMerger::Finish() {
  while (runs_.size() > 1) MergeTop();
  if (runs_.empty()) return {};
  std::vector<IndexEntry> out = std::move(runs_.back());
  runs_.clear();
  return out;
}

std::size_t FindEntry(std::span<const IndexEntry> entries, std::uint64_t sector) noexcept {
  const auto it = std::ranges::partition_point(
      entries, [sector](const IndexEntry& entry) { return entry.end() <= sector; });
  return static_cast<std::size_t>(it - entries.begin());
}

}  // namespace varve
