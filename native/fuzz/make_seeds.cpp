// Writes the small layers that fuzzing starts from: make_seeds FOLDER.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "core/layer_compress.hpp"
#include "core/layer_sink.hpp"

namespace {

using varve::Codec;

bool WriteSeed(const std::string& path, Codec codec, std::uint32_t block_bytes, bool noise) {
  varve::SinkOptions options;
  options.path = path;
  options.temp_path = path + ".partial";
  options.codec = codec;
  options.block_bytes = block_bytes;
  options.header.virtual_bytes = 1 << 20;
  options.header.uuid[0] = 7;
  options.header.parent_uuid[1] = 9;
  varve::LayerSink sink(options);
  std::vector<std::byte> slab(12288);
  std::uint32_t state = 1;
  for (std::byte& b : slab) {
    state = state * 1664525 + 1013904223;
    b = static_cast<std::byte>(noise ? state >> 24 : (state >> 24) & 1);
  }
  const std::vector<varve::LayerRow> rows = {
      {8192, 4096, 0}, {40960, 8192, varve::kZeroedRow}, {0, 4096, 4096}, {65536, 512, 8192}};
  if (!sink.Open().ok()) return false;
  varve::StagedBatch batch;
  std::vector<std::byte> blocks(varve::BlockEncoder::Bound(Codec::kLz4, block_bytes, 1 << 17));
  std::vector<std::uint32_t> lengths;
  if (codec == Codec::kNone) {
    sink.StageRaw(rows, slab, batch);
  } else {
    varve::BlockEncoder encoder(codec, block_bytes, true);
    const std::uint64_t used = encoder.EncodeRows(rows, slab, blocks, lengths);
    sink.StageBlocks(rows, std::span(blocks).first(used), lengths, batch);
  }
  sink.Hash(batch);
  return sink.Write(batch).ok() && sink.Finish().ok() && sink.Sync().ok() && sink.Publish().ok();
}

void PutText(std::vector<char>& file, std::size_t at, const char* text) {
  std::memcpy(file.data() + at, text, std::strlen(text));
}

void TarHeader(std::vector<char>& file, std::size_t at, const char* name, unsigned size,
               char type) {
  char digits[16];
  std::snprintf(digits, sizeof digits, "%011o", size);
  PutText(file, at, name);
  PutText(file, at + 124, digits);
  PutText(file, at + 148, "        ");
  file[at + 156] = type;
  PutText(file, at + 257, "ustar");
  unsigned sum = 0;
  for (std::size_t i = 0; i < 512; ++i) sum += static_cast<unsigned char>(file[at + i]);
  std::snprintf(digits, sizeof digits, "%06o", sum);
  PutText(file, at + 148, digits);
}

// The layer at `path`, wrapped: with a pax header, or plain.
bool WriteTar(const std::string& path, const std::string& out, bool pax) {
  std::FILE* in = std::fopen(path.c_str(), "rb");
  if (in == nullptr) return false;
  std::vector<char> body(1 << 16);
  const std::size_t size = std::fread(body.data(), 1, body.size(), in);
  std::fclose(in);
  const std::size_t start = pax ? 1536 : 512;
  std::vector<char> file(start + (size + 511) / 512 * 512 + 1024);
  if (pax) {
    const std::string record = "size=" + std::to_string(size) + "\n";
    const auto length = static_cast<unsigned>(record.size() + 3);
    TarHeader(file, 0, "overlaybd.pax", length, 'x');
    PutText(file, 512, (std::to_string(length) + " " + record).c_str());
    TarHeader(file, 1024, "overlaybd.commit", 0, '0');
  } else {
    TarHeader(file, 0, "layer", static_cast<unsigned>(size), '0');
  }
  std::memcpy(file.data() + start, body.data(), size);
  std::FILE* to = std::fopen(out.c_str(), "wb");
  if (to == nullptr) return false;
  const bool ok = std::fwrite(file.data(), 1, file.size(), to) == file.size();
  return std::fclose(to) == 0 && ok;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string folder = std::string(argv[1]) + "/";
  bool ok = true;
  for (const bool noise : {false, true}) {
    const std::string end = noise ? "-noise" : "";
    ok = ok && WriteSeed(folder + "raw" + end, Codec::kNone, 4096, noise);
    for (const std::uint32_t block : {4096u, 16384u}) {
      const std::string name = end + "-" + std::to_string(block);
      ok = ok && WriteSeed(folder + "lz4" + name, Codec::kLz4, block, noise);
      ok = ok && WriteSeed(folder + "zstd" + name, Codec::kZstd, block, noise);
    }
  }
  ok = ok && WriteTar(folder + "raw", folder + "raw.tar", true);
  ok = ok && WriteTar(folder + "lz4-4096", folder + "lz4.tar", true);
  ok = ok && WriteTar(folder + "zstd-16384", folder + "zstd.tar", false);
  if (!ok) std::fprintf(stderr, "could not write the seeds to %s\n", argv[1]);
  return ok ? 0 : 1;
}
