// A whole file of any shape, tar and ZFile included, parsed and its data read.
#include <algorithm>
#include <cstdlib>
#include <vector>

#include "core/layer_open.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  varve::MemorySource file(std::as_bytes(std::span(data, size)));
  varve::ParsedLayer layer;
  if (!varve::ParseLayer(file, layer).ok()) return 0;
  varve::WindowSource body(file, layer.body.offset, layer.body.size);
  const varve::ZFileTable table = layer.zfile.Table();
  varve::BlockDecoder decoder;
  varve::ZFileSource blocks(body, table, decoder);
  varve::ByteSource& content =
      layer.compressed ? static_cast<varve::ByteSource&>(blocks) : body;
  std::vector<std::byte> bytes(1 << 16);
  std::size_t reads = 0;
  for (const varve::IndexEntry& entry : layer.lsmt.entries) {
    if (entry.zeroed() || ++reads > 32) continue;
    const std::uint64_t length = std::min<std::uint64_t>(entry.length() * 512, bytes.size());
    const auto f = content.Read(entry.moffset() * 512, std::span(bytes).first(length));
    // Raw data that the index names is there.
    if (!layer.compressed && !f.ok()) std::abort();
  }
  return 0;
}
