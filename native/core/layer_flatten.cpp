#include "core/layer_flatten.hpp"

#include <algorithm>
#include <cstring>

#include "core/file_append.hpp"
#include "core/layer_sink.hpp"

namespace varve {
namespace {

constexpr std::uint64_t kPiece = 4096;
constexpr std::uint64_t kHourNs = 3'600'000'000'000;

bool AllZero(ConstLayerBytes bytes) noexcept {
  return bytes[0] == std::byte{0} &&
         std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0;
}

LayerFault Put(int fd, std::uint64_t offset, ConstLayerBytes bytes) noexcept {
  // SAFETY: pwritev only reads; iovec has no const form.
  const iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  const Slice whole(RealSyscalls(), nullptr, kHourNs);
  WriteOutcome outcome{};
  while (!outcome.done && !bytes.empty()) {
    outcome = WriteAll(fd, {&part, 1}, offset, outcome.bytes_done, whole);
    if (outcome.error != 0) return WriteFault("write", offset, outcome.error);
  }
  return {};
}

}  // namespace

LayerFault WriteSparse(int fd, std::span<const LayerRow> rows, ConstLayerBytes slab) noexcept {
  for (const LayerRow& row : rows) {
    if (row.slab_offset == kZeroedRow) continue;
    const ConstLayerBytes bytes = slab.subspan(row.slab_offset, row.length);
    std::uint64_t run = 0;  // start of what is not yet written
    std::uint64_t at = 0;
    while (at < bytes.size()) {
      const std::uint64_t step = std::min(kPiece, bytes.size() - at);
      if (AllZero(bytes.subspan(at, step))) {
        if (auto f = Put(fd, row.image_offset + run, bytes.subspan(run, at - run)); !f.ok()) {
          return f;
        }
        run = at + step;
      }
      at += step;
    }
    if (auto f = Put(fd, row.image_offset + run, bytes.subspan(run)); !f.ok()) return f;
  }
  return {};
}

}  // namespace varve
