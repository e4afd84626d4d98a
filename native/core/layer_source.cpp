#include "core/layer_source.hpp"

#include <unistd.h>

#include <cerrno>

namespace varve {
namespace {

bool Inside(std::uint64_t offset, std::uint64_t length, std::uint64_t size) noexcept {
  return offset <= size && length <= size - offset;
}

// Largest single pread: below the kernel's cap of 2147479552 bytes.
constexpr std::uint64_t kReadBytesMax = 1u << 30;

}  // namespace

LayerFault FileSource::Read(std::uint64_t offset, LayerBytes out) noexcept {
  if (!Inside(offset, out.size(), size_)) {
    return MakeFault(fault::kTruncated, "file", offset, out.size());
  }
  std::size_t done = 0;
  while (done < out.size()) {
    const std::uint64_t want = std::min<std::uint64_t>(out.size() - done, kReadBytesMax);
    const ssize_t got =
        ::pread(fd_, out.data() + done, want, static_cast<off_t>(base_ + offset + done));
    if (got < 0) {
      if (errno == EINTR) continue;
      return IoFault("file", offset + done, errno);
    }
    // The file is shorter than it was when it was opened.
    if (got == 0) return MakeFault(fault::kTruncated, "file", offset + done, size_);
    done += static_cast<std::size_t>(got);
  }
  if (counter_ != nullptr) counter_->fetch_add(done, std::memory_order_relaxed);
  return {};
}

LayerFault MemorySource::Read(std::uint64_t offset, LayerBytes out) noexcept {
  if (!Inside(offset, out.size(), bytes_.size())) {
    return MakeFault(fault::kTruncated, "file", offset, out.size());
  }
  if (!out.empty()) std::memcpy(out.data(), bytes_.data() + offset, out.size());
  return {};
}

LayerFault WindowSource::Read(std::uint64_t offset, LayerBytes out) noexcept {
  if (!Inside(offset, out.size(), size_)) {
    return MakeFault(fault::kTruncated, "file", offset, out.size());
  }
  return parent_.Read(base_ + offset, out);
}

}  // namespace varve
