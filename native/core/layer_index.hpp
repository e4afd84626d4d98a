// Merging the indexes of a stack: upper entries win, lower ones show through what is left.
#pragma once

#include <span>
#include <vector>

#include "core/layer_lsmt.hpp"

namespace varve {

// Both inputs sorted and free of overlap; so is the result. Zeroed entries of `upper` shadow too.
std::vector<IndexEntry> MergeIndexes(std::span<const IndexEntry> upper,
                                     std::span<const IndexEntry> lower);

// Merges the indexes of up to 255 layers, bottom first, tagging each entry with its position.
// Feeds in pairs of like size, so that work is entries × log(layers).
class IndexMerger {
 public:
  // Takes the next layer upwards.
  void Add(std::vector<IndexEntry> entries, std::uint8_t position);
  std::vector<IndexEntry> Finish();

 private:
  void MergeTop();
  std::vector<std::vector<IndexEntry>> runs_;  // bottom first, sizes falling
};

// First entry that ends after `sector`; entries.size() if none does.
std::size_t FindEntry(std::span<const IndexEntry> entries, std::uint64_t sector) noexcept;

// The part of `entry` within [from, to) sectors; the two overlap.
IndexEntry ClipEntry(const IndexEntry& entry, std::uint64_t from, std::uint64_t to) noexcept;

}  // namespace varve
