#include "minivm/guest_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace minivm {
namespace {

class UniqueFd {
 public:
  explicit UniqueFd(int fd) : fd_(fd) {}
  ~UniqueFd() {
    if (fd_ >= 0) close(fd_);
  }
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

bool IsZeroPage(const std::uint8_t* page) {
  // SAFETY: `page` is page-aligned guest memory of kPageBytes, mapped and readable.
  const auto* words = reinterpret_cast<const std::uint64_t*>(page);
  for (std::size_t i = 0; i < kPageBytes / 8; i += 8) {
    std::uint64_t any = 0;
    for (std::size_t j = 0; j < 8; ++j) any |= words[i + j];
    if (any != 0) return false;
  }
  return true;
}

Failure WriteAll(int fd, const std::uint8_t* data, std::uint64_t bytes, std::uint64_t offset) {
  while (bytes > 0) {
    const std::size_t chunk = static_cast<std::size_t>(std::min<std::uint64_t>(bytes, 64U << 20));
    const ssize_t n = pwrite(fd, data, chunk, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return FailErrno("Cannot write the memory file", n < 0 ? errno : EIO);
    data += n;
    bytes -= static_cast<std::uint64_t>(n);
    offset += static_cast<std::uint64_t>(n);
  }
  return std::nullopt;
}

}  // namespace

Failure FailErrno(const std::string& what, int error) {
  return what + ": " + strerror(error) + " (os error " + std::to_string(error) + ")";
}

GuestMemory::~GuestMemory() {
  for (const auto& region : regions_) munmap(region->host, region->bytes);
}

Failure GuestMemory::Map(const std::vector<RegionSpec>& specs, Backing backing,
                         const std::string& path, bool huge) {
  int raw = -1;
  if (backing == Backing::kFile) {
    raw = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (raw < 0) return FailErrno("Cannot open the memory file " + path, errno);
  }
  const UniqueFd fd(raw);
  if (backing == Backing::kFile) {
    std::uint64_t wanted = 0;
    for (const RegionSpec& spec : specs) wanted += spec.bytes;
    const off_t size = lseek(fd.get(), 0, SEEK_END);  // works for block devices too
    if (size < 0) return FailErrno("Cannot size the memory file " + path, errno);
    if (static_cast<std::uint64_t>(size) < wanted) {
      return "The memory file " + path + " is " + std::to_string(size) +
             " bytes, shorter than the " + std::to_string(wanted) + " bytes of the guest's regions";
    }
  }
  for (const RegionSpec& spec : specs) {
    if (Failure failure = AddRegion(spec, backing, fd.get(), huge)) return failure;
  }
  return std::nullopt;
}

Failure GuestMemory::AddRegion(const RegionSpec& spec, Backing backing, int fd, bool huge) {
  const int share = backing == Backing::kFile ? 0 : MAP_ANONYMOUS;
  const off_t offset = backing == Backing::kFile ? static_cast<off_t>(image_bytes_) : 0;
  void* host =
      mmap(nullptr, spec.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | share,
           backing == Backing::kFile ? fd : -1, offset);
  if (host == MAP_FAILED) return FailErrno("Cannot map guest memory", errno);
  // Without this, one written page can make 512 resident, and page sets depend on the host's
  // settings.
  madvise(host, spec.bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  auto region = std::make_unique<Region>();
  region->guest_address = spec.guest_address;
  region->image_offset = image_bytes_;
  region->bytes = spec.bytes;
  region->pages = spec.bytes / kPageBytes;
  region->slot = static_cast<std::uint32_t>(regions_.size());
  region->backing = backing;
  region->host = static_cast<std::uint8_t*>(host);
  const std::size_t words = WordsFor(region->pages);
  for (Bitmap* bits : {&region->dirty, &region->vmm, &region->removed, &region->frozen_dirty,
                       &region->frozen_removed, &region->unreadable}) {
    bits->assign(words, 0);
  }
  region->log = std::make_unique<std::atomic<std::uint64_t>[]>(words);
  image_bytes_ += spec.bytes;
  regions_.push_back(std::move(region));
  return std::nullopt;
}

void GuestMemory::DropLastRegion() {
  Region& last = *regions_.back();
  munmap(last.host, last.bytes);
  image_bytes_ -= last.bytes;
  regions_.pop_back();
}

Region* GuestMemory::FindByImage(std::uint64_t image_offset) {
  for (const auto& region : regions_) {
    if (image_offset - region->image_offset < region->bytes &&
        image_offset >= region->image_offset) {
      return region.get();
    }
  }
  return nullptr;
}

Region* GuestMemory::FindByGuestPage(std::uint64_t pfn) {
  const std::uint64_t address = pfn * kPageBytes;
  for (const auto& region : regions_) {
    if (address >= region->guest_address && address - region->guest_address < region->bytes) {
      return region.get();
    }
  }
  return nullptr;
}

Failure GuestMemory::Remove(Region& region, std::uint64_t first_page, std::uint64_t page_count) {
  std::uint8_t* start = region.host + first_page * kPageBytes;
  const std::size_t bytes = page_count * kPageBytes;
  if (region.backing == Backing::kFile) {
    // MADV_DONTNEED would show the file's bytes again, so put fresh anonymous memory there.
    void* host = mmap(start, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (host == MAP_FAILED) return FailErrno("Cannot remove pages", errno);
    madvise(start, bytes, MADV_NOHUGEPAGE);
  } else if (madvise(start, bytes, MADV_DONTNEED) != 0) {
    return FailErrno("Cannot remove pages", errno);
  }
  for (std::uint64_t page = first_page; page < first_page + page_count; ++page) {
    SetBit(region.removed, page);
  }
  return std::nullopt;
}

Failure GuestMemory::SetReadable(Region& region, std::uint64_t page, bool readable) {
  const int protection = readable ? PROT_READ | PROT_WRITE : PROT_NONE;
  if (mprotect(region.host + page * kPageBytes, kPageBytes, protection) != 0) {
    return FailErrno("Cannot protect a page", errno);
  }
  if (readable) {
    ClearBit(region.unreadable, page);
  } else {
    SetBit(region.unreadable, page);
  }
  return std::nullopt;
}

Failure GuestMemory::Resident(const Region& region, Bitmap& out) const {
  out.assign(WordsFor(region.pages), 0);
  constexpr std::uint64_t kChunkPages = 1U << 20;
  std::vector<unsigned char> state(static_cast<std::size_t>(std::min(region.pages, kChunkPages)));
  for (std::uint64_t first = 0; first < region.pages; first += kChunkPages) {
    const std::uint64_t count = std::min(kChunkPages, region.pages - first);
    if (mincore(region.host + first * kPageBytes, count * kPageBytes, state.data()) != 0) {
      return FailErrno("mincore", errno);
    }
    for (std::uint64_t i = 0; i < count; ++i) {
      if (state[i] & 1U) SetBit(out, first + i);
    }
  }
  return std::nullopt;
}

void GuestMemory::ZeroPagesOf(const Region& region, const Bitmap& in, Bitmap& out) {
  out.assign(in.size(), 0);
  ForEachRun(in, region.pages, [&](std::uint64_t first, std::uint64_t count) {
    for (std::uint64_t page = first; page < first + count; ++page) {
      if (!TestBit(region.unreadable, page) && IsZeroPage(region.host + page * kPageBytes)) {
        SetBit(out, page);
      }
    }
    return true;
  });
}

Failure GuestMemory::WriteFile(const std::string& path, const std::vector<Bitmap>* sets) const {
  const UniqueFd fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (fd.get() < 0) return FailErrno("Cannot open the memory file " + path, errno);
  struct stat info {};
  if (fstat(fd.get(), &info) != 0) return FailErrno("Cannot stat the memory file", errno);
  if (static_cast<std::uint64_t>(info.st_size) != image_bytes_ || sets == nullptr) {
    if (ftruncate(fd.get(), 0) != 0) return FailErrno("Cannot empty the memory file", errno);
    if (ftruncate(fd.get(), static_cast<off_t>(image_bytes_)) != 0) {
      return FailErrno("Cannot size the memory file", errno);
    }
  }
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    const Region& region = *regions_[i];
    Bitmap all;
    if (sets == nullptr) {
      // Anonymous memory that is not resident is zero: leave a hole. Anything else has to be read.
      if (region.backing == Backing::kAnonymous) {
        if (Failure failure = Resident(region, all)) return failure;
      } else {
        all.assign(WordsFor(region.pages), ~0ULL);
      }
    }
    Failure failure;
    ForEachRun(sets == nullptr ? all : (*sets)[i], region.pages,
               [&](std::uint64_t first, std::uint64_t count) {
                 failure = WriteAll(fd.get(), region.host + first * kPageBytes, count * kPageBytes,
                                    region.image_offset + first * kPageBytes);
                 return !failure.has_value();
               });
    if (failure) return failure;
  }
  if (fsync(fd.get()) != 0) return FailErrno("Cannot sync the memory file", errno);
  return std::nullopt;
}

}  // namespace minivm
