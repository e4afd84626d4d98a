// Where layer bytes come from: a part of a file, or memory (fuzzing), behind one bounded read.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/layer_bytes.hpp"
#include "core/layer_fault.hpp"

namespace varve {

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  virtual std::uint64_t size() const noexcept = 0;
  // Fills `out` from `offset`, or says why not. Never returns short: past the end is a fault.
  virtual LayerFault Read(std::uint64_t offset, LayerBytes out) noexcept = 0;
};

// Bytes [base, base + size) of an open file. Does not own the descriptor.
class FileSource final : public ByteSource {
 public:
  // `counter`, where there is one, gets every byte read added.
  FileSource(int fd, std::uint64_t base, std::uint64_t size,
             std::atomic<std::uint64_t>* counter = nullptr) noexcept
      : fd_(fd), base_(base), size_(size), counter_(counter) {}
  std::uint64_t size() const noexcept override { return size_; }
  LayerFault Read(std::uint64_t offset, LayerBytes out) noexcept override;

 private:
  int fd_;
  std::uint64_t base_;
  std::uint64_t size_;
  std::atomic<std::uint64_t>* counter_;
};

// Bytes of a span. SAFETY: the span outlives the source.
class MemorySource final : public ByteSource {
 public:
  explicit MemorySource(ConstLayerBytes bytes) noexcept : bytes_(bytes) {}
  std::uint64_t size() const noexcept override { return bytes_.size(); }
  LayerFault Read(std::uint64_t offset, LayerBytes out) noexcept override;

 private:
  ConstLayerBytes bytes_;
};

// A window of another source. SAFETY: the parent outlives it.
class WindowSource final : public ByteSource {
 public:
  WindowSource(ByteSource& parent, std::uint64_t base, std::uint64_t size) noexcept
      : parent_(parent), base_(base), size_(size) {}
  std::uint64_t size() const noexcept override { return size_; }
  LayerFault Read(std::uint64_t offset, LayerBytes out) noexcept override;

 private:
  ByteSource& parent_;
  std::uint64_t base_;
  std::uint64_t size_;
};

}  // namespace varve
