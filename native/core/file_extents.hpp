// lseek(SEEK_DATA, SEEK_HOLE): which pages of a sparse file hold data.
#pragma once

#include "core/bitmap.hpp"
#include "core/slice.hpp"

namespace varve {

struct ScanOutcome {
  std::uint64_t next;  // where to go on
  int error;           // 0, or the errno of the failing call
  bool done;
};

// Sets the bits of the pages that a data extent touches, from file offset `from` on, up to
// `page_count` pages. Moves the descriptor's file offset. A file system without holes reports all
// data.
ScanOutcome ScanFileExtents(int fd, std::uint64_t from, std::uint64_t page_count, Bits bits,
                            const Slice& slice) noexcept;

}  // namespace varve
