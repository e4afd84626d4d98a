#include "core/file_read.hpp"

#include <cassert>
#include <cerrno>

namespace varve {
namespace {

struct Extent {
  std::uint64_t offset;
  std::uint64_t length;
};

// The bytes to read at `row`, `skip` bytes into it: to the end of the last adjacent row, at most
// `bytes_max`.
Extent NextExtent(std::span<const Row> rows, std::size_t row, std::uint64_t skip,
                  std::uint64_t bytes_max) noexcept {
  Extent extent{rows[row].image_offset + skip, rows[row].length - skip};
  for (std::size_t i = row + 1; i < rows.size() && extent.length < bytes_max; ++i) {
    if (rows[i].image_offset != extent.offset + extent.length) break;
    extent.length += rows[i].length;
  }
  if (extent.length > bytes_max) extent.length = bytes_max;
  return extent;
}

}  // namespace

ReadOutcome ReadFileRows(int fd, const ReadRequest& request, const Slice& slice,
                         const Syscalls& sys) noexcept {
  ReadOutcome out{request.from, 0, 0, 0, 0, false, false};
  std::size_t row = 0;
  std::uint64_t skip = request.from;
  while (true) {
    while (row < request.rows.size() && skip >= request.rows[row].length) {
      skip -= request.rows[row].length;
      row += 1;
    }
    if (row == request.rows.size()) {
      out.done = true;
      return out;
    }
    out.cancelled = slice.Cancelled();
    if (out.cancelled || (out.syscalls > 0 && slice.Expired())) return out;
    const Extent extent = NextExtent(request.rows, row, skip, request.call_bytes_max);
    assert(out.bytes_done + extent.length <= request.dest.size());
    const iovec local{request.dest.data() + out.bytes_done, extent.length};
    const ssize_t got = sys.preadv(fd, &local, 1, static_cast<off_t>(extent.offset));
    const int error = got < 0 ? errno : 0;
    out.syscalls += 1;
    if (got > 0) {
      out.bytes_done += static_cast<std::uint64_t>(got);
      skip += static_cast<std::uint64_t>(got);
      continue;
    }
    if (error == EINTR || error == EAGAIN) continue;
    out.error = error != 0 ? error : ENODATA;
    out.address = extent.offset;
    return out;
  }
}

}  // namespace varve
