#include <dirent.h>
#include <fcntl.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "check.hpp"
#include "core/layer_compress.hpp"
#include "core/layer_open.hpp"
#include "core/layer_sink.hpp"
#include "fake_syscalls.hpp"

namespace varve::test {
namespace {

// A folder of its own, removed with what is in it.
class Folder {
 public:
  Folder() { CHECK(::mkdtemp(name_) != nullptr); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    for (const std::string& name : Names()) ::unlink((std::string(name_) + "/" + name).c_str());
    ::rmdir(name_);
  }
  std::string Path(const char* name) const { return std::string(name_) + "/" + name; }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    DIR* folder = ::opendir(name_);
    while (const dirent* entry = ::readdir(folder)) {
      if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
    }
    ::closedir(folder);
    return names;
  }

 private:
  char name_[32] = "/tmp/varve-layer-XXXXXX";
};

const std::vector<LayerRow> kRows = {{8192, 4096, 0}, {40960, 8192, kZeroedRow}, {0, 512, 4096}};

std::vector<std::byte> Slab() {
  std::vector<std::byte> slab(8192);
  Random random(7);
  for (auto& byte : slab) byte = static_cast<std::byte>(random.Below(3));
  return slab;
}

// Appends one batch. The first fault, if there is one; then there is nothing to seal.
LayerFault Append(LayerSink& sink, Codec codec, std::span<const LayerRow> rows,
                  ConstLayerBytes slab) {
  std::vector<std::byte> blocks(BlockEncoder::Bound(Codec::kLz4, 4096, 1 << 18));
  std::vector<std::uint32_t> lengths;
  StagedBatch batch;
  if (codec == Codec::kNone) {
    sink.StageRaw(rows, slab, batch);
  } else {
    BlockEncoder encoder(codec, 4096, true);
    const std::uint64_t used = encoder.EncodeRows(rows, slab, blocks, lengths);
    sink.StageBlocks(rows, std::span(blocks).first(used), lengths, batch);
  }
  sink.Hash(batch);
  return sink.Write(batch);
}

SinkOptions OptionsFor(const Folder& folder, const char* name, Codec codec) {
  SinkOptions options;
  options.path = folder.Path(name);
  options.temp_path = options.path + ".partial";
  options.codec = codec;
  options.header.virtual_bytes = 1 << 20;
  options.header.uuid[3] = 5;
  return options;
}

LayerFault Seal(LayerSink& sink, SinkTotals* totals) {
  if (auto f = sink.Finish(); !f.ok()) return f;
  if (auto f = sink.HashFile(); !f.ok()) return f;
  if (auto f = sink.Sync(); !f.ok()) return f;
  if (totals != nullptr) *totals = sink.totals();
  return sink.Publish();
}

LayerFault WriteLayer(const Folder& folder, const char* name, Codec codec,
                      const Syscalls& sys = RealSyscalls(), SinkTotals* totals = nullptr) {
  LayerSink sink(OptionsFor(folder, name, codec), sys);
  const std::vector<std::byte> slab = Slab();
  if (auto f = sink.Open(); !f.ok()) return f;
  if (auto f = Append(sink, codec, kRows, slab); !f.ok()) return f;
  return Seal(sink, totals);
}

std::vector<std::byte> FileBytes(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  CHECK(static_cast<bool>(fd));
  std::vector<std::byte> bytes(static_cast<std::size_t>(::lseek(fd.get(), 0, SEEK_END)));
  CHECK_EQ(::pread(fd.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  return bytes;
}

// Whether anything is found wrong: structure, trailer, any block.
bool Sound(ConstLayerBytes bytes) {
  MemorySource file(bytes);
  ParsedLayer layer;
  if (!ParseLayer(file, layer).ok() || !layer.compressed) return false;
  const bool overwritten = (layer.zfile.header.flags & zfile_flag::kOverwritten) != 0;
  if (!overwritten || !CheckZFileTrailer(file, layer.zfile).ok()) return false;
  const ZFileTable table = layer.zfile.Table();
  BlockDecoder decoder;
  ZFileSource content(file, table, decoder);
  std::vector<std::byte> all(content.size());
  return content.Read(0, all).ok();
}

void EveryFlippedBit() {
  for (const Codec codec : {Codec::kLz4, Codec::kZstd}) {
    const Folder folder;
    CHECK(WriteLayer(folder, "layer", codec).ok());
    std::vector<std::byte> bytes = FileBytes(folder.Path("layer"));
    CHECK(Sound(bytes));
    for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
      const std::byte mask{static_cast<unsigned char>(1u << bit % 8)};
      bytes[bit / 8] ^= mask;
      if (Sound(bytes)) Fail(__FILE__, __LINE__, "flip not found", static_cast<long long>(bit), 0);
      bytes[bit / 8] ^= mask;
    }
  }
}

void EveryTruncation() {
  for (const Codec codec : {Codec::kNone, Codec::kLz4, Codec::kZstd}) {
    const Folder folder;
    CHECK(WriteLayer(folder, "layer", codec).ok());
    const std::vector<std::byte> bytes = FileBytes(folder.Path("layer"));
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      MemorySource file{std::span(bytes).first(size)};
      ParsedLayer layer;
      CHECK(!ParseLayer(file, layer).ok());
    }
  }
}

void ShortWrites() {
  for (const Codec codec : {Codec::kNone, Codec::kZstd}) {
    const Folder folder;
    SinkTotals expected;
    CHECK(WriteLayer(folder, "whole", codec, RealSyscalls(), &expected).ok());
    Random random(Seed() + 30);
    for (int round = 0; round < 20; ++round) {
      script = Script{};
      script.shorten = &random;
      script.errors = {0, EINTR, 0, EAGAIN, EINTR};
      SinkTotals totals;
      CHECK(WriteLayer(folder, "layer", codec, kFake, &totals).ok());
      CHECK(std::strcmp(totals.digest, expected.digest) == 0);
      CHECK(FileBytes(folder.Path("layer")) == FileBytes(folder.Path("whole")));
      CHECK_EQ(::unlink(folder.Path("layer").c_str()), 0);
    }
  }
}

// Every write of a layer fails once, with each error: no file is left, and the kind is right.
void FailingWrites() {
  for (const Codec codec : {Codec::kNone, Codec::kLz4}) {
    for (const int error : {EIO, ENOSPC, EDQUOT}) {
      int failed = 0;
      for (int call = 0;; ++call) {
        const Folder folder;
        script = Script{};
        script.errors.assign(static_cast<std::size_t>(call), 0);
        script.errors.push_back(error);
        const LayerFault f = WriteLayer(folder, "layer", codec, kFake);
        if (f.ok()) break;
        failed += 1;
        CHECK_EQ(f.error_number, error);
        const char* kind = error == EIO ? fault::kIo : fault::kNoSpace;
        CHECK(std::strcmp(f.kind, kind) == 0);
        CHECK(folder.Names().empty());
      }
      CHECK(failed >= 3);
    }
  }
}

// A write that takes nothing, over and over, is an error and no endless loop.
void WritesOfNothing() {
  const Folder folder;
  script = Script{};
  script.move_nothing = true;
  const LayerFault f = WriteLayer(folder, "layer", Codec::kNone, kFake);
  CHECK_EQ(f.error_number, EIO);
  CHECK(folder.Names().empty());
}

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kPages = 64;
// What a page of a layer is: nothing, zeroed, or filled with this byte.
constexpr int kHole = -1;
constexpr int kZero = 0;
using Image = std::array<int, kPages>;

// What one round names, as rows and a slab; the rows of neighbours that are alike are one row.
struct Round {
  std::vector<LayerRow> rows;
  std::vector<std::byte> slab;
};

Round RoundOf(const Image& pages) {
  Round round;
  for (std::uint64_t page = 0; page < kPages; ++page) {
    if (pages[page] == kHole) continue;
    const bool zeroed = pages[page] == kZero;
    const std::uint64_t at = zeroed ? kZeroedRow : round.slab.size();
    const bool joins = page > 0 && pages[page - 1] != kHole &&
                       (pages[page - 1] == kZero) == zeroed;
    if (joins) {
      round.rows.back().length += kPage;
    } else {
      round.rows.push_back({page * kPage, kPage, at});
    }
    if (!zeroed) round.slab.insert(round.slab.end(), kPage, std::byte(pages[page]));
  }
  return round;
}

LayerFault WriteRounds(const Folder& folder, Codec codec, std::span<const Image> rounds,
                       SinkTotals& totals) {
  LayerSink sink(OptionsFor(folder, "layer", codec));
  if (auto f = sink.Open(); !f.ok()) return f;
  for (std::size_t i = 0; i < rounds.size(); ++i) {
    if (i > 0) {
      if (auto f = sink.Supersede(); !f.ok()) return f;
    }
    const Round round = RoundOf(rounds[i]);
    if (auto f = Append(sink, codec, round.rows, round.slab); !f.ok()) return f;
  }
  return Seal(sink, &totals);
}

// The pages as the layer's index and content have them; fails where two segments overlap.
Image ReadImage(ConstLayerBytes bytes) {
  MemorySource file(bytes);
  ParsedLayer layer;
  CHECK(ParseLayer(file, layer).ok());
  const ZFileTable table = layer.compressed ? layer.zfile.Table() : ZFileTable{};
  BlockDecoder decoder;
  ZFileSource blocks(file, table, decoder);
  Image image;
  image.fill(kHole);
  std::array<std::byte, kPage> page;
  for (const IndexEntry& entry : layer.lsmt.entries) {
    for (std::uint64_t done = 0; done < entry.length() * kSectorBytes; done += kPage) {
      int& value = image[(entry.offset() * kSectorBytes + done) / kPage];
      CHECK_EQ(value, kHole);
      value = kZero;
      if (entry.zeroed()) continue;
      const std::uint64_t at = entry.moffset() * kSectorBytes + done;
      CHECK((layer.compressed ? blocks.Read(at, page) : file.Read(at, page)).ok());
      value = static_cast<int>(page[0]);
      for (const std::byte byte : page) CHECK_EQ(static_cast<int>(byte), value);
    }
  }
  return image;
}

// Writes the rounds, reads the layer back, and compares it with the newest of each page.
SinkTotals CheckRounds(Codec codec, std::span<const Image> rounds) {
  const Folder folder;
  SinkTotals totals;
  CHECK(WriteRounds(folder, codec, rounds, totals).ok());
  Image newest;
  newest.fill(kHole);
  std::uint64_t staged = 0;
  for (const Image& round : rounds) {
    for (std::uint64_t page = 0; page < kPages; ++page) {
      if (round[page] != kHole) newest[page] = round[page];
      if (round[page] > kZero) staged += kPage;
    }
  }
  const std::vector<std::byte> bytes = FileBytes(folder.Path("layer"));
  CHECK(ReadImage(bytes) == newest);
  // Blocks that nothing names any more are whole too.
  if (codec != Codec::kNone) CHECK(Sound(bytes));
  const auto data = std::ranges::count_if(newest, [](int value) { return value > kZero; });
  CHECK_EQ(totals.data_bytes, static_cast<std::uint64_t>(data) * kPage);
  CHECK_EQ(totals.zeroed_bytes,
           static_cast<std::uint64_t>(std::ranges::count(newest, kZero)) * kPage);
  CHECK_EQ(totals.superseded_bytes, staged - totals.data_bytes);
  CHECK_EQ(totals.file_bytes, bytes.size());
  return totals;
}

void NewerRoundsWin() {
  for (const Codec codec : {Codec::kNone, Codec::kLz4, Codec::kZstd}) {
    std::array<Image, 3> rounds;
    for (Image& round : rounds) round.fill(kHole);
    for (const int page : {0, 1, 2, 3, 5}) rounds[0][page] = 11;
    rounds[0][8] = rounds[0][9] = kZero;
    rounds[1][1] = rounds[1][8] = 22;
    rounds[1][2] = rounds[1][10] = kZero;
    rounds[2][1] = 33;
    const SinkTotals totals = CheckRounds(codec, rounds);
    CHECK_EQ(totals.superseded_bytes, 3 * kPage);
    // 0 | 1 | zeroed 2 | 3 | 5 | 8 | zeroed 9 and 10: neighbours of two rounds are one segment.
    CHECK_EQ(totals.segments, 7u);
  }
}

void RandomRounds() {
  Random random(Seed() + 40);
  for (const Codec codec : {Codec::kNone, Codec::kLz4, Codec::kZstd}) {
    for (int layer = 0; layer < 30; ++layer) {
      std::vector<Image> rounds(1 + random.Below(5));
      for (Image& round : rounds) {
        round.fill(kHole);
        for (std::uint64_t run = random.Below(8); run > 0; --run) {
          const std::uint64_t first = random.Below(kPages);
          const std::uint64_t end = std::min(kPages, first + 1 + random.Below(12));
          const bool zeroed = random.Below(3) == 0;
          for (std::uint64_t page = first; page < end; ++page) {
            round[page] = zeroed ? kZero : static_cast<int>(1 + random.Below(255));
          }
        }
      }
      CheckRounds(codec, rounds);
    }
  }
}

// Only a newer round may name a page again.
void OverlapWithinARound() {
  const std::vector<std::byte> slab = Slab();
  for (const bool last : {false, true}) {
    const Folder folder;
    LayerSink sink(OptionsFor(folder, "layer", Codec::kNone));
    CHECK(sink.Open().ok());
    CHECK(Append(sink, Codec::kNone, kRows, slab).ok());
    CHECK(sink.Supersede().ok());
    CHECK(Append(sink, Codec::kNone, kRows, slab).ok());
    CHECK(Append(sink, Codec::kNone, std::span(kRows).first(1), slab).ok());
    const LayerFault f = last ? sink.Finish() : sink.Supersede();
    CHECK(!f.ok());
    CHECK(std::strcmp(f.kind, fault::kOverlap) == 0);
    sink.Abandon();
    CHECK(folder.Names().empty());
  }
}

void UuidText() {
  UuidBytes uuid;
  CHECK(ParseUuid("0A0b0C0d-1111-4222-8333-000001000000", uuid));
  char text[37];
  FormatUuid(uuid, false, text);
  CHECK(std::strcmp(text, "0a0b0c0d-1111-4222-8333-000001000000") == 0);
  FormatUuid(uuid, true, text);
  CHECK(std::strcmp(text, "0A0B0C0D-1111-4222-8333-000001000000") == 0);
  CHECK(!ParseUuid("0a0b0c0d-1111-4222-8333-00000100000g", uuid));
  CHECK(!ParseUuid("0a0b0c0d01111-4222-8333-000001000000", uuid));
}

constexpr Fact kFacts[] = {
    {"layer: every flipped bit of a compressed layer is found", EveryFlippedBit},
    {"layer: every truncation is refused", EveryTruncation},
    {"layer: short writes go on where they ended", ShortWrites},
    {"layer: a failing write leaves no file, whichever it is", FailingWrites},
    {"layer: a write of nothing is an error", WritesOfNothing},
    {"layer: rounds: the newest copy of a page wins, older ones are counted", NewerRoundsWin},
    {"layer: rounds: random ones read back as the newest of each page", RandomRounds},
    {"layer: rounds: a page named twice in one is refused", OverlapWithinARound},
    {"layer: uuids are written in either case and read in both", UuidText},
};

}  // namespace

std::span<const Fact> LayerFacts() { return kFacts; }

}  // namespace varve::test
