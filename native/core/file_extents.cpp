#include "core/file_extents.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "core/units.hpp"

namespace varve {

ScanOutcome ScanFileExtents(int fd, std::uint64_t from, std::uint64_t page_count, Bits bits,
                            const Slice& slice) noexcept {
  const std::uint64_t end = page_count * kPageBytes;
  ScanOutcome out{from, 0, false};
  while (out.next < end) {
    if (out.next > from && slice.Expired()) return out;
    const off_t data = ::lseek(fd, static_cast<off_t>(out.next), SEEK_DATA);
    if (data < 0) {
      // ENXIO: no data at or after this offset.
      out.error = errno == ENXIO ? 0 : errno;
      break;
    }
    const auto data_start = static_cast<std::uint64_t>(data);
    if (data_start >= end) break;
    const off_t hole = ::lseek(fd, data, SEEK_HOLE);
    if (hole < 0) {
      out.error = errno;
      break;
    }
    const std::uint64_t data_end = std::min(static_cast<std::uint64_t>(hole), end);
    if (data_end <= data_start) {
      out.error = EIO;  // the file changes under us
      break;
    }
    const std::uint64_t first = data_start / kPageBytes;
    BitmapSetRange(bits, first, (data_end + kPageBytes - 1) / kPageBytes - first);
    out.next = data_end;
  }
  out.done = true;
  return out;
}

}  // namespace varve
