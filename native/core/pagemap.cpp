#include "core/pagemap.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cerrno>
#include <cstdio>

namespace varve {
namespace {

// The kernel's ABI (include/uapi/linux/fs.h since 6.7), under our own names: older headers lack it
// and newer ones must not clash.
struct ScanRegion {
  std::uint64_t start;
  std::uint64_t end;
  std::uint64_t categories;
};

struct ScanArg {
  std::uint64_t size;
  std::uint64_t flags;
  std::uint64_t start;
  std::uint64_t end;
  std::uint64_t walk_end;
  std::uint64_t vec;
  std::uint64_t vec_len;
  std::uint64_t max_pages;
  std::uint64_t category_inverted;
  std::uint64_t category_mask;
  std::uint64_t category_anyof_mask;
  std::uint64_t return_mask;
};
static_assert(sizeof(ScanArg) == 96);

constexpr unsigned long kPagemapScan = _IOWR('f', 16, ScanArg);
constexpr std::uint64_t kIsFile = 1u << 2;
constexpr std::uint64_t kIsPresent = 1u << 3;
constexpr std::uint64_t kIsSwapped = 1u << 4;
constexpr std::uint64_t kIsZero = 1u << 5;

// Entry bits of the file's 64-bit words.
constexpr std::uint64_t kEntryFile = std::uint64_t{1} << 61;
constexpr std::uint64_t kEntrySwapped = std::uint64_t{1} << 62;
constexpr std::uint64_t kEntryPresent = std::uint64_t{1} << 63;

// Most address space one ioctl walks: a fully resident 512 MiB takes under a millisecond.
constexpr std::uint64_t kScanBytesMax = 512u << 20;

struct Step {
  std::uint64_t pages;  // covered, matching or not
  int error;
};

// One ioctl over [address, address + length), whose first page is image page `page`.
Step ScanStep(int fd, std::uint64_t address, std::uint64_t length, std::uint64_t page,
              PagemapMode mode, Bits bits) noexcept {
  std::array<ScanRegion, 512> found;
  const std::uint64_t skip_file = mode == PagemapMode::kPrivate ? kIsFile : 0;
  const std::uint64_t only_zero = mode == PagemapMode::kZero ? kIsZero : 0;
  ScanArg arg{};
  arg.size = sizeof arg;
  arg.start = address;
  arg.end = address + std::min(length, kScanBytesMax);
  // SAFETY: the kernel writes at most vec_len entries, before the ioctl returns.
  arg.vec = reinterpret_cast<std::uint64_t>(found.data());
  arg.vec_len = found.size();
  arg.category_inverted = skip_file;
  arg.category_mask = skip_file | only_zero;
  arg.category_anyof_mask = kIsPresent | kIsSwapped;
  const int count = ::ioctl(fd, kPagemapScan, &arg);
  if (count < 0) return {0, errno};
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    const std::uint64_t start = std::max(found[i].start, arg.start);
    const std::uint64_t end = std::min(found[i].end, arg.end);
    if (end > start) {
      BitmapSetRange(bits, page + (start - address) / kPageBytes, (end - start) / kPageBytes);
    }
  }
  const std::uint64_t walked = arg.walk_end > address ? arg.walk_end - address : 0;
  if (walked == 0 || walked > arg.end - address) return {0, EIO};
  return {walked / kPageBytes, 0};
}

Step PreadStep(int fd, std::uint64_t address, std::uint64_t length, std::uint64_t page,
               PagemapMode mode, Bits bits) noexcept {
  std::array<std::uint64_t, 4096> entries;
  const std::uint64_t want = std::min<std::uint64_t>(entries.size(), length / kPageBytes);
  const ssize_t got =
      ::pread(fd, entries.data(), want * 8, static_cast<off_t>(address / kPageBytes * 8));
  if (got < 0) return {0, errno};
  const auto pages = static_cast<std::uint64_t>(got) / 8;
  if (pages == 0) return {0, ESRCH};  // the process has no memory any more
  for (std::uint64_t i = 0; i < pages; ++i) {
    const std::uint64_t entry = entries[i];
    // An entry says nothing of the zero page, except to a process with CAP_SYS_ADMIN.
    if (mode == PagemapMode::kZero) continue;
    const bool there = (entry & (kEntryPresent | kEntrySwapped)) != 0;
    const bool file = (entry & kEntryFile) != 0;
    if (there && (mode == PagemapMode::kResident || !file)) BitmapSetRange(bits, page + i, 1);
  }
  return {pages, 0};
}

}  // namespace

UniqueFd OpenPagemap(pid_t pid, int& error) noexcept {
  std::array<char, 40> path;
  std::snprintf(path.data(), path.size(), "/proc/%d/pagemap", static_cast<int>(pid));
  UniqueFd fd(::open(path.data(), O_RDONLY | O_CLOEXEC));
  error = fd ? 0 : errno;
  if (error == ENOENT) error = ESRCH;
  return fd;
}

PagemapMethod PreferredPagemapMethod(const UniqueFd& pagemap) noexcept {
  ScanArg arg{};
  arg.size = sizeof arg;
  arg.category_anyof_mask = kIsPresent;
  const int answer = ::ioctl(pagemap.get(), kPagemapScan, &arg);
  return answer < 0 && (errno == ENOTTY || errno == EINVAL) ? PagemapMethod::kPread
                                                            : PagemapMethod::kScan;
}

PagemapOutcome ScanPagemap(const UniqueFd& pagemap, std::span<const Region> regions,
                           std::uint64_t from_page, PagemapMode mode, PagemapMethod method,
                           Bits bits, const Slice& slice) noexcept {
  PagemapOutcome out{from_page, 0, false};
  for (const Region& region : regions) {
    const std::uint64_t first = region.image_offset / kPageBytes;
    const std::uint64_t end = first + region.length / kPageBytes;
    while (out.next_page < end) {
      assert(out.next_page >= first);
      if (out.next_page > from_page && slice.Expired()) return out;
      const std::uint64_t skip = (out.next_page - first) * kPageBytes;
      const auto step = method == PagemapMethod::kScan ? ScanStep : PreadStep;
      const Step made = step(pagemap.get(), region.host_address + skip, region.length - skip,
                             out.next_page, mode, bits);
      if (made.error == EINTR) continue;
      if (made.error != 0) {
        out.error = made.error;
        return out;
      }
      out.next_page += made.pages;
    }
  }
  out.done = true;
  return out;
}

}  // namespace varve
