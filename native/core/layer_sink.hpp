// One layer file being written: appended to in order, sealed once, or abandoned without a trace.
#pragma once

#include <sys/uio.h>

#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core/layer_digest.hpp"
#include "core/layer_lsmt.hpp"
#include "core/layer_reader.hpp"
#include "core/layer_zfile.hpp"
#include "core/syscalls.hpp"
#include "core/unique_fd.hpp"

namespace varve {

namespace fault {
inline constexpr const char* kNoSpace = "layer-no-space";
inline constexpr const char* kExists = "layer-exists";
inline constexpr const char* kOverlap = "layer-overlap";
inline constexpr const char* kTooManySegments = "layer-too-many-segments";
}  // namespace fault

// A failed write's fault: full disks and names already taken have kinds of their own.
LayerFault WriteFault(const char* field, std::uint64_t offset, int error_number) noexcept;

struct SinkOptions {
  std::string path;       // final name
  std::string temp_path;  // in the same directory
  LsmtHeader header;      // uuid, parent_uuid, virtual_bytes, user_tag
  Codec codec = Codec::kNone;
  std::uint32_t block_bytes = kZFileBlockBytesMin;
};

// Bytes with their place in the file. SAFETY: the memory outlives the batch's Write and Hash.
struct StagedBatch {
  std::uint64_t file_offset = 0;
  std::uint64_t bytes = 0;
  std::vector<iovec> parts;
};

struct SinkTotals {
  std::uint64_t file_bytes = 0;
  std::uint64_t data_bytes = 0;    // guest bytes stored, before compression
  std::uint64_t superseded_bytes = 0;  // stored as well, and not in the index: newer ones won
  std::uint64_t zeroed_bytes = 0;
  std::uint64_t segments = 0;
  char digest[65] = "";
};

// Order: Open; any number of Stage with Write and Hash of each; Finish; Sync and HashFile; Publish.
// Between two Stages, Supersede.
// Stage assigns places and is called from one thread; Write runs of different batches in any order,
// Hash runs in order; the two may overlap. After a fault only Abandon.
class LayerSink {
 public:
  explicit LayerSink(SinkOptions options, const Syscalls& sys = RealSyscalls())
      : options_(std::move(options)), sys_(sys) {}
  ~LayerSink() { Abandon(); }
  LayerSink(const LayerSink&) = delete;
  LayerSink& operator=(const LayerSink&) = delete;

  LayerFault Open() noexcept;
  // Raw: rows lie within the slab, sector-aligned (checked by callers).
  void StageRaw(std::span<const LayerRow> rows, ConstLayerBytes slab, StagedBatch& out);
  // Blocks of the rows' bytes, as BlockEncoder::EncodeRows stored them.
  void StageBlocks(std::span<const LayerRow> rows, ConstLayerBytes blocks,
                   std::span<const std::uint32_t> lengths, StagedBatch& out);
  // What is staged from now on wins over what was staged before, where both name a sector. Within
  // what lies between two calls overlap stays a fault.
  LayerFault Supersede();
  LayerFault Write(const StagedBatch& batch) noexcept;
  void Hash(const StagedBatch& batch) noexcept;
  LayerFault Finish() noexcept;   // index, trailer, jump table, headers
  LayerFault Sync() noexcept;     // mode 0444 and fsync
  LayerFault HashFile() noexcept; // compressed only: its header is written last
  LayerFault Publish() noexcept;  // rename without overwrite, fsync of the directory
  void Abandon() noexcept;        // closes, and unlinks what is not published

  const SinkTotals& totals() const noexcept { return totals_; }
  bool compressed() const noexcept { return options_.codec != Codec::kNone; }
  // `blocks` blocks are what `bytes` of content take, the last one padded.
  bool BlocksHold(std::uint64_t blocks, std::uint64_t bytes) const noexcept {
    return blocks == (bytes + options_.block_bytes - 1) / options_.block_bytes;
  }

 private:
  void AddEntries(std::span<const LayerRow> rows, std::uint64_t content);
  LayerFault WriteAt(std::uint64_t offset, ConstLayerBytes bytes) noexcept;
  LayerFault WriteParts(std::uint64_t offset, std::span<const iovec> parts) noexcept;
  LayerFault FinishRaw(ConstLayerBytes tail) noexcept;
  LayerFault FinishCompressed(ConstLayerBytes tail) noexcept;

  SinkOptions options_;
  const Syscalls& sys_;
  UniqueFd fd_;
  UniqueFd directory_;
  bool published_ = false;
  bool created_ = false;
  std::uint64_t file_at_ = 0;     // next free byte of the file
  std::uint64_t content_at_ = 0;  // next free byte of the LSMT content; the same where raw
  std::vector<IndexEntry> entries_;     // since the last Supersede
  std::vector<IndexEntry> superseded_;  // before it: sorted, free of overlap
  std::vector<std::uint32_t> lengths_;
  LayerDigest digest_;
  std::mutex flush_mutex_;
  std::uint64_t unflushed_ = 0;
  std::uint64_t staged_bytes_ = 0;
  SinkTotals totals_;
};

}  // namespace varve
