#include "core/file_append.hpp"

#include <array>
#include <cerrno>

namespace varve {

WriteOutcome WriteAll(int fd, std::span<const iovec> iovecs, std::uint64_t offset,
                      std::uint64_t from, const Slice& slice, const Syscalls& sys,
                      std::uint64_t call_bytes_max) noexcept {
  WriteOutcome out{from, 0, 0, false, false};
  std::array<iovec, kIovecsMax> batch;
  std::size_t index = 0;
  std::uint64_t skip = from;  // within iovecs[index]
  while (true) {
    while (index < iovecs.size() && skip >= iovecs[index].iov_len) {
      skip -= iovecs[index].iov_len;
      index += 1;
    }
    if (index == iovecs.size()) {
      out.done = true;
      return out;
    }
    out.cancelled = slice.Cancelled();
    if (out.cancelled || (out.syscalls > 0 && slice.Expired())) return out;
    std::size_t count = 0;
    std::uint64_t bytes = 0;
    std::uint64_t inner = skip;
    for (std::size_t i = index;
         i < iovecs.size() && count < kIovecsMax && bytes < call_bytes_max; ++i) {
      std::uint64_t length = iovecs[i].iov_len - inner;
      if (length > call_bytes_max - bytes) length = call_bytes_max - bytes;
      if (length > 0) {
        batch[count++] = iovec{static_cast<std::byte*>(iovecs[i].iov_base) + inner, length};
      }
      bytes += length;
      inner = 0;
    }
    const ssize_t put = sys.pwritev(fd, batch.data(), static_cast<int>(count),
                                    static_cast<off_t>(offset + out.bytes_done));
    const int error = put < 0 ? errno : 0;
    out.syscalls += 1;
    if (put > 0) {
      out.bytes_done += static_cast<std::uint64_t>(put);
      skip += static_cast<std::uint64_t>(put);
      continue;
    }
    if (error == EINTR || error == EAGAIN) continue;
    out.error = error != 0 ? error : EIO;
    return out;
  }
}

}  // namespace varve
