// Guest RAM: regions mapped in this process, what is known about their pages, and the memory file.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "minivm/bitmap.hpp"

namespace minivm {

enum class Backing { kAnonymous, kFile, kUffd };

struct RegionSpec {
  std::uint64_t guest_address;
  std::uint64_t bytes;
};

// All bitmaps have WordsFor(pages) words. Only the API thread touches them, except `log`.
struct Region {
  std::uint64_t guest_address = 0;
  std::uint64_t image_offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t pages = 0;
  std::uint32_t slot = 0;
  Backing backing = Backing::kAnonymous;
  std::uint8_t* host = nullptr;
  Bitmap dirty;         // guest writes of the current epoch, fetched from the backend's log
  Bitmap vmm;           // device writes of the current epoch
  Bitmap removed;       // pages removed and not written since
  Bitmap frozen_dirty;  // the set of the open VMM-side epoch
  Bitmap frozen_removed;
  Bitmap unreadable;                                  // pages made PROT_NONE by a scripted fault
  std::unique_ptr<std::atomic<std::uint64_t>[]> log;  // thread backend's dirty log
};

// Where an operation failed; empty = it did not.
using Failure = std::optional<std::string>;
Failure FailErrno(const std::string& what, int error);

class GuestMemory {
 public:
  GuestMemory() = default;
  ~GuestMemory();
  GuestMemory(const GuestMemory&) = delete;
  GuestMemory& operator=(const GuestMemory&) = delete;

  // Maps every region: MAP_PRIVATE of `path` at its image offset for kFile, otherwise anonymous.
  // Refuses a file shorter than the image. `huge` allows transparent huge pages.
  Failure Map(const std::vector<RegionSpec>& specs, Backing backing, const std::string& path,
              bool huge);
  Failure AddRegion(const RegionSpec& spec, Backing backing, int fd, bool huge);
  // Unmaps the last region.
  void DropLastRegion();

  std::vector<std::unique_ptr<Region>>& regions() { return regions_; }
  const std::vector<std::unique_ptr<Region>>& regions() const { return regions_; }
  std::uint64_t image_bytes() const { return image_bytes_; }

  Region* FindByImage(std::uint64_t image_offset);
  Region* FindByGuestPage(std::uint64_t pfn);

  // Gives the pages back to the host: they read zero from here on.
  Failure Remove(Region& region, std::uint64_t first_page, std::uint64_t page_count);
  Failure SetReadable(Region& region, std::uint64_t page, bool readable);

  // mincore(2): present in this process or in the page cache behind it.
  Failure Resident(const Region& region, Bitmap& out) const;
  // Bits of `in` whose page is all zero bytes.
  static void ZeroPagesOf(const Region& region, const Bitmap& in, Bitmap& out);

  // Writes the memory file: `sets[i]` names the pages of region i; null = everything. An existing
  // file of the image's size is written over in place, as Firecracker does; any other is emptied
  // first.
  Failure WriteFile(const std::string& path, const std::vector<Bitmap>* sets) const;

 private:
  std::vector<std::unique_ptr<Region>> regions_;
  std::uint64_t image_bytes_ = 0;
};

}  // namespace minivm
