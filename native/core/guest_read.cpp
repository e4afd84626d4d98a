#include "core/guest_read.hpp"

#include <array>
#include <cassert>
#include <cerrno>

namespace varve {
namespace {

constexpr std::uint64_t kEnomemNapNs = 1'000'000;

// Where in the rows the next byte comes from.
struct Cursor {
  std::size_t row = 0;
  std::uint64_t offset = 0;  // within that row
};

void Advance(Cursor& cursor, std::span<const Row> rows, std::uint64_t by) noexcept {
  while (cursor.row < rows.size() && by >= rows[cursor.row].length - cursor.offset) {
    by -= rows[cursor.row].length - cursor.offset;
    cursor.row += 1;
    cursor.offset = 0;
  }
  cursor.offset += by;
  assert(by == 0 || cursor.row < rows.size());
}

struct Batch {
  std::array<iovec, kIovecsMax> remote;
  std::size_t count = 0;
  std::uint64_t bytes = 0;
};

void Fill(Batch& batch, Cursor cursor, std::span<const Row> rows,
          std::uint64_t bytes_max) noexcept {
  batch.count = 0;
  batch.bytes = 0;
  while (cursor.row < rows.size() && batch.count < kIovecsMax && batch.bytes < bytes_max) {
    const Row& row = rows[cursor.row];
    std::uint64_t length = row.length - cursor.offset;
    if (length > bytes_max - batch.bytes) length = bytes_max - batch.bytes;
    if (length > 0) {
      // SAFETY: an address of the other process; never dereferenced here.
      void* base = reinterpret_cast<void*>(row.host_address + cursor.offset);
      batch.remote[batch.count++] = iovec{base, length};
    }
    batch.bytes += length;
    cursor.row += 1;
    cursor.offset = 0;
  }
}

}  // namespace

std::uint64_t RowBytes(std::span<const Row> rows) noexcept {
  std::uint64_t sum = 0;
  for (const Row& row : rows) {
    if (sum + row.length < sum) return UINT64_MAX;
    sum += row.length;
  }
  return sum;
}

ReadOutcome ReadGuestRows(pid_t pid, const ReadRequest& request, const Slice& slice,
                          const Syscalls& sys) noexcept {
  ReadOutcome out{request.from, 0, request.stalled_ns, 0, 0, false, false};
  Cursor cursor;
  Advance(cursor, request.rows, request.from);
  Batch batch;
  while (true) {
    Fill(batch, cursor, request.rows, request.call_bytes_max);
    if (batch.bytes == 0) {
      out.done = true;
      return out;
    }
    out.cancelled = slice.Cancelled();
    if (out.cancelled || (out.syscalls > 0 && slice.Expired())) return out;
    assert(out.bytes_done + batch.bytes <= request.dest.size());
    const iovec local{request.dest.data() + out.bytes_done, batch.bytes};
    const ssize_t got = sys.process_vm_readv(pid, &local, 1, batch.remote.data(), batch.count, 0);
    const int error = got < 0 ? errno : 0;
    out.syscalls += 1;
    if (got > 0) {
      out.bytes_done += static_cast<std::uint64_t>(got);
      out.stalled_ns = 0;
      Advance(cursor, request.rows, static_cast<std::uint64_t>(got));
      continue;
    }
    if (error == EINTR || error == EAGAIN) continue;
    if (error == ENOMEM && out.stalled_ns < request.stalled_ns_max) {
      const std::uint64_t before = sys.now_ns();
      sys.sleep_ns(kEnomemNapNs);
      out.stalled_ns += sys.now_ns() - before + 1;  // never 0: it says that the read is stalled
      continue;
    }
    // A call that reads nothing and reports nothing would loop for ever: an I/O error.
    out.error = error != 0 ? error : EIO;
    if (out.error == EFAULT) {
      // The kernel moves whole pages in order and fails only when it moved none, so the page at
      // the cursor is the one that cannot be read.
      const std::uint64_t at = request.rows[cursor.row].host_address + cursor.offset;
      out.address = at / kPageBytes * kPageBytes;
    }
    return out;
  }
}

}  // namespace varve
