// The guest's device window: memory that guest and VMM share and that is not guest RAM. It holds
// the mailbox, the guest's program, a pool of random bytes, and the list of pages to touch. Because
// the guest keeps its counter here, a guest that is told to write 100 pages dirties 100 pages of
// RAM. The window is device state: it is saved in the VM state file, never in the memory file.
#pragma once

#include <cstddef>
#include <cstdint>

namespace minivm {

// Guest-physical address of the window: inside the 32-bit MMIO gap (3 GiB to 4 GiB).
inline constexpr std::uint64_t kWindowAddress = 0xD0000000ULL;
inline constexpr std::uint64_t kMailboxOffset = 0;
inline constexpr std::uint64_t kCodeOffset = 0x1000;
inline constexpr std::uint64_t kPoolOffset = 0x2000;
inline constexpr std::uint64_t kPoolBytes =
    0x101000;  // 1 MiB of starting points, and one page more
inline constexpr std::uint64_t kListOffset = 0x200000;
inline constexpr std::uint32_t kListCapacity = 4U << 20;
inline constexpr std::uint64_t kWindowBytes = kListOffset + 4ULL * kListCapacity;

enum Command : std::uint32_t { kIdle = 0, kRandom = 1, kFill = 2, kRead = 3 };
enum Flags : std::uint32_t { kFlagList = 1, kFlagLoop = 2, kFlagPaced = 4 };

// Offsets are part of the guest's program (test/guest.S): change both or neither.
struct Mailbox {
  std::uint64_t counter;      // 0x00 ticks once per turn of the guest's main loop, never goes back
  std::uint64_t last_clock;   // 0x08 the guest's clock at the last tick; 0 = take no gap
  std::uint64_t max_gap;      // 0x10 largest difference between two ticks, in clock units
  std::uint32_t reset_gap;    // 0x18 set by the VMM; the guest clears max_gap and this
  std::uint32_t command;      // 0x1c Command; the guest sets kIdle when done
  std::uint32_t flags;        // 0x20 Flags
  std::uint32_t count;        // 0x24 pages in a pass
  std::uint32_t first;        // 0x28 first guest page number, without kFlagList
  std::uint32_t index;        // 0x2c next page of the pass
  std::uint32_t words;        // 0x30 32-bit words to write in each page, 2..1024
  std::uint32_t value;        // 0x34 seed (kRandom) or the word to store (kFill)
  std::uint32_t generation;   // 0x38 passes finished
  std::uint32_t granted;      // 0x3c pages the VMM has granted, modulo 2^32 (kFlagPaced)
  std::uint32_t spent;        // 0x40 pages taken from the grant
  std::uint32_t read_sum;     // 0x44 sum of the words read (kRead)
  std::uint64_t pages_total;  // 0x48 pages touched since boot
};
static_assert(sizeof(Mailbox) == 0x50);
static_assert(offsetof(Mailbox, pages_total) == 0x48);

// Finalizer with good avalanche on 32 bits; the guest has the same in its program.
inline std::uint32_t Mix32(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352dU;
  x ^= x >> 15;
  x *= 0x846ca68bU;
  x ^= x >> 16;
  return x;
}

// What a kRandom pass puts first into guest page `pfn`.
inline std::uint32_t PatternWord(std::uint32_t seed, std::uint32_t generation, std::uint32_t pfn) {
  return Mix32((seed + generation * 0x9e3779b9U) ^ (pfn * 0x85ebca6bU));
}

inline constexpr std::uint32_t kPoolMask = 0xFFFFC;

}  // namespace minivm
