// preadv: rows of a memory file, packed. The file-based twin of guest_read.
#pragma once

#include "core/guest_read.hpp"

namespace varve {

// Reads rows of the file, at their image offsets, into dest one after another. Rows that lie next
// to each other in the file are read together. Short reads go on; EINTR and EAGAIN are retried; the
// end of the file inside a row is ENODATA, with the offset as `address`. Never throws.
ReadOutcome ReadFileRows(int fd, const ReadRequest& request, const Slice& slice,
                         const Syscalls& sys = RealSyscalls()) noexcept;

}  // namespace varve
