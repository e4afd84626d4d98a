// One compressed block: decodes to exactly its size, or is a fault.
#include <algorithm>
#include <vector>

#include "core/layer_blocks.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 8) return 0;
  varve::ZFileTable table;
  table.codec = (data[0] & 1) != 0 ? varve::Codec::kZstd : varve::Codec::kLz4;
  table.verify = (data[0] & 2) != 0;
  table.block_bytes = 4096u << (data[0] >> 2) % 5;
  const bool whole = (data[0] & 128) != 0;
  const std::uint32_t part = 1 + (data[1] | data[2] << 8) % table.block_bytes;
  const std::uint32_t length = whole ? table.block_bytes : part;
  varve::BlockDecoder decoder;
  std::vector<std::byte> out(length);
  // A jump table never lists a block without a byte besides its CRC.
  (void)decoder.Decode(table, std::as_bytes(std::span(data, size)).subspan(3), out, 0);
  return 0;
}
