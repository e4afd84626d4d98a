// LSMT header, trailer and index: what parses has a sorted index whose data lies in the content.
#include <cstdlib>

#include "core/layer_lsmt.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  varve::MemorySource file(std::as_bytes(std::span(data, size)));
  varve::LsmtLayer layer;
  if (!varve::ReadLsmt(file, layer).ok()) return 0;
  std::uint64_t end = 0;
  for (const varve::IndexEntry& entry : layer.entries) {
    if (entry.length() == 0 || entry.offset() < end || entry.tag() != 0) std::abort();
    end = entry.end();
    const std::uint64_t stored = entry.zeroed() ? 0 : entry.length();
    if ((entry.moffset() + stored) * varve::kSectorBytes > size) std::abort();
  }
  if (layer.entries.size() * 16 > size) std::abort();
  return 0;
}
