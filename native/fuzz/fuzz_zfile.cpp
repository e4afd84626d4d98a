// ZFile header, jump table and blocks: reads content in pieces of several shapes. CRCs are not
// checked in this build, so that what lies behind them is reached.
#include <algorithm>
#include <cstdlib>
#include <vector>

#include "core/layer_blocks.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  varve::MemorySource file(std::as_bytes(std::span(data, size)));
  varve::ZFile zfile;
  if (!varve::ReadZFile(file, zfile).ok()) return 0;
  if (zfile.starts.size() * 4 > size + 4 || zfile.bases.size() > zfile.starts.size()) std::abort();
  const varve::ZFileTable table = zfile.Table();
  if (table.Start(table.blocks) > size) std::abort();
  varve::BlockDecoder decoder;
  varve::BlockCache cache(2 * varve::kZFileBlockBytesMax);
  varve::ZFileSource content(file, table, decoder, &cache);
  const std::uint64_t total = std::min<std::uint64_t>(content.size(), 1 << 20);
  std::vector<std::byte> all(total);
  const bool whole = content.Read(0, all).ok();
  // Odd pieces read the same as the whole.
  std::vector<std::byte> piece(1500);
  for (std::uint64_t at = 0; at + 1 < total; at += std::max<std::uint64_t>(total / 5, 1)) {
    const auto out = std::span(piece).first(std::min<std::uint64_t>(1500, total - at));
    const bool part = content.Read(at, out).ok();
    if (whole && (!part || !std::equal(out.begin(), out.end(), all.begin() + at))) std::abort();
  }
  std::byte past;
  if (content.Read(content.size(), {&past, 1}).ok()) std::abort();
  return 0;
}
