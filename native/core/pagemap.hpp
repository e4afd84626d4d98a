// /proc/<pid>/pagemap: which pages of another process are there.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <span>

#include "core/bitmap.hpp"
#include "core/slice.hpp"
#include "core/unique_fd.hpp"
#include "core/units.hpp"

namespace varve {

enum class PagemapMode {
  kResident,  // present or swapped
  kPrivate,   // present or swapped, and not backed by a file (so written since a private mapping)
  kZero,      // the kernel's shared zero page is mapped there: read, not written. kScan only
};

enum class PagemapMethod {
  kScan,   // PAGEMAP_SCAN ioctl, Linux 6.7
  kPread,  // one 64-bit entry a page
};

struct PagemapOutcome {
  std::uint64_t next_page;  // of the image; where to go on
  int error;                // 0, or the errno of the failing call
  bool done;
};

// Opens the pagemap of `pid`; sets `error` where it cannot (EACCES or EPERM without ptrace
// permission, ESRCH where there is no such process).
UniqueFd OpenPagemap(pid_t pid, int& error) noexcept;

// Whether this kernel knows the ioctl, asked of an empty range.
PagemapMethod PreferredPagemapMethod(const UniqueFd& pagemap) noexcept;

// Sets bits of matching pages, from image page `from_page` on, until done or the slice is over.
// Regions are as CheckLayout wants them. Unmapped pages match nothing.
PagemapOutcome ScanPagemap(const UniqueFd& pagemap, std::span<const Region> regions,
                           std::uint64_t from_page, PagemapMode mode, PagemapMethod method,
                           Bits bits, const Slice& slice) noexcept;

}  // namespace varve
