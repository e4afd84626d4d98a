#include "core/layer_sink.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>

#include "core/layer_compress.hpp"
#include "core/layer_index.hpp"
#include "core/crc32c.hpp"
#include "core/file_append.hpp"

namespace varve {
namespace {

constexpr std::uint64_t kHourNs = 3'600'000'000'000;
// Write-back starts once this much is dirty, so that the fsync at the end finds little to do.
constexpr std::uint64_t kFlushBytes = 8 << 20;
constexpr std::uint64_t kHashPiece = 1 << 20;

std::string DirectoryOf(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace

LayerFault WriteFault(const char* field, std::uint64_t offset, int error_number) noexcept {
  LayerFault f = IoFault(field, offset, error_number);
  if (error_number == ENOSPC || error_number == EDQUOT || error_number == EFBIG) {
    f.kind = fault::kNoSpace;
  }
  if (error_number == EEXIST) f.kind = fault::kExists;
  return f;
}

LayerFault LayerSink::Open() noexcept {
  directory_.Reset(::open(DirectoryOf(options_.path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory_) return WriteFault("directory", 0, errno);
  struct stat info;
  if (::lstat(options_.path.c_str(), &info) == 0) return WriteFault("path", 0, EEXIST);
  fd_.Reset(::open(options_.temp_path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd_) return WriteFault("create", 0, errno);
  created_ = true;
  // Held until the file is sealed or gone: tells a writer's file from a dead writer's.
  if (::flock(fd_.get(), LOCK_EX | LOCK_NB) != 0) return WriteFault("lock", 0, errno);
  LsmtHeader header = options_.header;
  header.flags = lsmt_flag::kHeader | lsmt_flag::kData | lsmt_flag::kSealed;
  std::vector<std::byte> first(compressed() ? options_.block_bytes : kLsmtBlockBytes);
  EncodeLsmtBlock(header, std::span(first).first(kLsmtBlockBytes));
  content_at_ = first.size();
  if (!compressed()) {
    file_at_ = first.size();
    digest_.Update(first);
    return WriteAt(0, first);
  }
  ZFileHeader outer;
  outer.flags = zfile_flag::kHeader | zfile_flag::kData | zfile_flag::kDigest;
  outer.block_bytes = options_.block_bytes;
  outer.codec = options_.codec;
  std::vector<std::byte> bytes(
      kZFileHeaderBytes + BlockEncoder::Bound(options_.codec, options_.block_bytes, first.size()));
  EncodeZFileHeader(outer, std::span(bytes).first(kZFileHeaderBytes));
  BlockEncoder encoder(options_.codec, options_.block_bytes, true);
  lengths_.push_back(encoder.Encode(first, std::span(bytes).subspan(kZFileHeaderBytes)));
  file_at_ = kZFileHeaderBytes + lengths_.back();
  return WriteAt(0, std::span(bytes).first(file_at_));
}

// Index entries of rows whose data bytes lie one after another from `content`.
void LayerSink::AddEntries(std::span<const LayerRow> rows, std::uint64_t content) {
  for (const LayerRow& row : rows) {
    const bool zeroed = row.slab_offset == kZeroedRow;
    std::uint64_t offset = row.image_offset / kSectorBytes;
    std::uint64_t left = row.length / kSectorBytes;
    std::uint64_t moffset = zeroed ? kFirstDataSector : content / kSectorBytes;
    while (left > 0) {
      const std::uint64_t length = std::min(left, kSegmentSectorsMax);
      entries_.push_back(IndexEntry::Make(offset, length, moffset, zeroed));
      offset += length;
      left -= length;
      if (!zeroed) moffset += length;
    }
    if (!zeroed) staged_bytes_ += row.length;
    if (!zeroed) content += row.length;
  }
}

void LayerSink::StageRaw(std::span<const LayerRow> rows, ConstLayerBytes slab, StagedBatch& out) {
  AddEntries(rows, content_at_);
  out.file_offset = file_at_;
  for (const LayerRow& row : rows) {
    if (row.slab_offset == kZeroedRow || row.length == 0) continue;
    // SAFETY: pwritev only reads; iovec has no const form.
    auto* base = const_cast<std::byte*>(slab.data() + row.slab_offset);
    iovec* last = out.parts.empty() ? nullptr : &out.parts.back();
    if (last != nullptr && static_cast<std::byte*>(last->iov_base) + last->iov_len == base) {
      last->iov_len += row.length;
    } else {
      out.parts.push_back({base, row.length});
    }
    out.bytes += row.length;
  }
  file_at_ += out.bytes;
  content_at_ = file_at_;
}

void LayerSink::StageBlocks(std::span<const LayerRow> rows, ConstLayerBytes blocks,
                            std::span<const std::uint32_t> lengths, StagedBatch& out) {
  AddEntries(rows, content_at_);
  out.file_offset = file_at_;
  out.bytes = blocks.size();
  // SAFETY: pwritev only reads; iovec has no const form.
  if (!blocks.empty()) out.parts.push_back({const_cast<std::byte*>(blocks.data()), blocks.size()});
  lengths_.insert(lengths_.end(), lengths.begin(), lengths.end());
  file_at_ += blocks.size();
  content_at_ += lengths.size() * options_.block_bytes;
}

LayerFault LayerSink::Supersede() {
  if (auto f = NormaliseIndex(entries_); !f.ok()) {
    f.kind = f.kind == fault::kTooLarge ? fault::kTooManySegments : fault::kOverlap;
    return f;
  }
  if (superseded_.empty()) {
    superseded_ = std::move(entries_);
  } else {
    superseded_ = MergeIndexes(entries_, superseded_);
  }
  entries_.clear();
  return {};
}

LayerFault LayerSink::WriteAt(std::uint64_t offset, ConstLayerBytes bytes) noexcept {
  // SAFETY: pwritev only reads; iovec has no const form.
  const iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  return WriteParts(offset, {&part, 1});
}

LayerFault LayerSink::WriteParts(std::uint64_t offset, std::span<const iovec> parts) noexcept {
  // No slicing here: this runs on the thread pool, and a batch is a few MiB.
  const Slice whole(sys_, nullptr, kHourNs);
  std::uint64_t done = 0;
  for (;;) {
    const WriteOutcome outcome = WriteAll(fd_.get(), parts, offset, done, whole, sys_);
    if (outcome.error != 0) return WriteFault("write", offset + outcome.bytes_done, outcome.error);
    if (outcome.done) return {};
    done = outcome.bytes_done;
  }
}

LayerFault LayerSink::Write(const StagedBatch& batch) noexcept {
  if (batch.bytes == 0) return {};
  if (auto f = WriteParts(batch.file_offset, batch.parts); !f.ok()) return f;
  const std::lock_guard lock(flush_mutex_);
  unflushed_ += batch.bytes;
  if (unflushed_ < kFlushBytes) return {};
  unflushed_ = 0;
  // Best effort: the fsync in Sync is what counts.
  (void)::sync_file_range(fd_.get(), 0, 0, SYNC_FILE_RANGE_WRITE);
  return {};
}

void LayerSink::Hash(const StagedBatch& batch) noexcept {
  if (compressed()) return;
  for (const iovec& part : batch.parts) {
    digest_.Update({static_cast<const std::byte*>(part.iov_base), part.iov_len});
  }
}

LayerFault LayerSink::Finish() noexcept {
  const bool once = superseded_.empty();
  if (auto f = Supersede(); !f.ok()) return f;
  entries_ = std::move(superseded_);
  // Parts of superseded segments may lie side by side now.
  if (auto f = once ? LayerFault{} : NormaliseIndex(entries_); !f.ok()) {
    f.kind = fault::kTooManySegments;
    return f;
  }
  totals_.segments = entries_.size();
  for (const IndexEntry& entry : entries_) {
    (entry.zeroed() ? totals_.zeroed_bytes : totals_.data_bytes) += entry.length() * kSectorBytes;
  }
  totals_.superseded_bytes = staged_bytes_ - totals_.data_bytes;
  const std::uint64_t padded =
      (entries_.size() + kIndexPadEntries - 1) / kIndexPadEntries * kIndexPadEntries;
  const std::uint64_t index_bytes = padded * sizeof(IndexEntry);
  std::vector<std::byte> tail(index_bytes + kLsmtBlockBytes);
  if (!entries_.empty()) {
    std::memcpy(tail.data(), entries_.data(), entries_.size() * sizeof(IndexEntry));
  }
  for (std::uint64_t i = entries_.size(); i < padded; ++i) {
    StoreField<std::uint64_t>(tail, i * sizeof(IndexEntry), kInvalidOffset);
  }
  LsmtHeader trailer = options_.header;
  trailer.flags = lsmt_flag::kData | lsmt_flag::kSealed;
  trailer.index_offset = content_at_;
  trailer.index_entries = padded;
  EncodeLsmtBlock(trailer, std::span(tail).subspan(index_bytes));
  return compressed() ? FinishCompressed(tail) : FinishRaw(tail);
}

LayerFault LayerSink::FinishRaw(ConstLayerBytes tail) noexcept {
  if (auto f = WriteAt(file_at_, tail); !f.ok()) return f;
  file_at_ += tail.size();
  totals_.file_bytes = file_at_;
  digest_.Update(tail);
  digest_.Finish(totals_.digest);
  return {};
}

LayerFault LayerSink::FinishCompressed(ConstLayerBytes tail) noexcept {
  const std::uint64_t block = options_.block_bytes;
  std::vector<std::byte> out(
      BlockEncoder::Bound(options_.codec, options_.block_bytes, tail.size()));
  BlockEncoder encoder(options_.codec, options_.block_bytes, true);
  std::uint64_t used = 0;
  for (std::uint64_t at = 0; at < tail.size(); at += block) {
    const auto piece = tail.subspan(at, std::min<std::uint64_t>(block, tail.size() - at));
    lengths_.push_back(encoder.Encode(piece, std::span(out).subspan(used)));
    used += lengths_.back();
  }
  if (auto f = WriteAt(file_at_, std::span(out).first(used)); !f.ok()) return f;
  const auto table = std::as_bytes(std::span(lengths_));
  ZFileHeader outer;
  outer.flags = zfile_flag::kData | zfile_flag::kSealed | zfile_flag::kDigest;
  outer.index_offset = file_at_ + used;
  outer.index_entries = lengths_.size();
  outer.original_bytes = content_at_ + tail.size();
  outer.index_crc = Crc32c(0, table);
  outer.block_bytes = options_.block_bytes;
  outer.codec = options_.codec;
  std::array<std::byte, kZFileHeaderBytes> trailer;
  EncodeZFileHeader(outer, trailer);
  outer.flags = zfile_flag::kHeader | zfile_flag::kData | zfile_flag::kOverwritten |
                zfile_flag::kDigest;
  std::array<std::byte, kZFileHeaderBytes> header;
  EncodeZFileHeader(outer, header);
  if (auto f = WriteAt(outer.index_offset, table); !f.ok()) return f;
  const std::uint64_t trailer_at = outer.index_offset + table.size();
  if (auto f = WriteAt(trailer_at, trailer); !f.ok()) return f;
  if (auto f = WriteAt(0, header); !f.ok()) return f;
  file_at_ = trailer_at + kZFileHeaderBytes;
  totals_.file_bytes = file_at_;
  return {};
}

LayerFault LayerSink::Sync() noexcept {
  if (::fchmod(fd_.get(), 0444) != 0) return WriteFault("chmod", 0, errno);
  if (::fsync(fd_.get()) != 0) return WriteFault("fsync", 0, errno);
  return {};
}

LayerFault LayerSink::HashFile() noexcept {
  if (!compressed()) return {};
  FileSource file(fd_.get(), 0, totals_.file_bytes);
  std::vector<std::byte> piece(kHashPiece);
  for (std::uint64_t at = 0; at < totals_.file_bytes; at += kHashPiece) {
    const auto bytes =
        std::span(piece).first(std::min<std::uint64_t>(kHashPiece, totals_.file_bytes - at));
    if (auto f = file.Read(at, bytes); !f.ok()) return f;
    digest_.Update(bytes);
  }
  digest_.Finish(totals_.digest);
  return {};
}

LayerFault LayerSink::Publish() noexcept {
  const char* from = options_.temp_path.c_str();
  const char* to = options_.path.c_str();
  if (::renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) != 0) {
    // Filesystems without the flag: link never overwrites either.
    if (errno != EINVAL && errno != ENOSYS) return WriteFault("rename", 0, errno);
    if (::link(from, to) != 0) return WriteFault("link", 0, errno);
    (void)::unlink(from);
  }
  created_ = false;
  published_ = true;
  if (::fsync(directory_.get()) != 0) {
    const int error_number = errno;
    (void)::unlink(to);  // not known to be durable: the caller must not record it
    published_ = false;
    return WriteFault("fsync directory", 0, error_number);
  }
  fd_.Reset();
  directory_.Reset();
  return {};
}

void LayerSink::Abandon() noexcept {
  if (created_) (void)::unlink(options_.temp_path.c_str());
  created_ = false;
  fd_.Reset();
  directory_.Reset();
}

}  // namespace varve
