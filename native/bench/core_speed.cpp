// How fast the scans are, next to a memcpy and a plain read of the same memory in the same run.
// Prints GB/s (1e9 bytes a second), the best of several passes, and a checksum of the work.
#include <sys/mman.h>

#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>

#include "core/bitmap.hpp"
#include "core/coalesce.hpp"
#include "core/crc32c.hpp"
#include "core/units.hpp"
#include "core/zero_scan.hpp"

namespace {

constexpr int kPasses = 7;

std::uint64_t checksum = 0;

std::span<std::byte> Touched(std::size_t bytes, int fill) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  ::madvise(memory, bytes, MADV_HUGEPAGE);
  std::memset(memory, fill, bytes);
  return {static_cast<std::byte*>(memory), bytes};
}

template <typename Work>
double BestSeconds(Work work) {
  double best = 1e9;
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (took.count() < best) best = took.count();
  }
  return best;
}

template <typename Work>
void Speed(const char* name, std::size_t bytes, Work work) {
  std::printf("%-38s %7.1f GB/s\n", name, static_cast<double>(bytes) / BestSeconds(work) / 1e9);
}

std::uint64_t SumWords(std::span<const std::byte> memory) {
  std::uint64_t a = 0;
  std::uint64_t b = 0;
  for (std::size_t i = 0; i + 16 <= memory.size(); i += 16) {
    std::uint64_t pair[2];
    std::memcpy(pair, memory.data() + i, 16);
    a += pair[0];
    b += pair[1];
  }
  return a + b;
}

void Zero(const char* name, std::span<const std::byte> memory, varve::SimdLevel level) {
  if (level > varve::BestSimdLevel()) return;
  std::unique_ptr<std::uint8_t[]> bits(
      new std::uint8_t[varve::BitmapBytes(memory.size() / varve::kPageBytes)]);
  const varve::Bits out{bits.get(), varve::BitmapBytes(memory.size() / varve::kPageBytes)};
  Speed(name, memory.size(), [&] { varve::FindZeroPages(memory, out, level); });
  checksum += varve::BitmapCount(out);
}

void Scans(const char* where, std::size_t bytes) {
  const std::span<std::byte> zeros = Touched(bytes, 0);
  const std::span<std::byte> ones = Touched(bytes, 1);
  std::printf("-- %s (%zu MiB)\n", where, bytes >> 20);
  Speed("memcpy", bytes, [&] { std::memcpy(ones.data(), zeros.data(), bytes); });
  std::memset(ones.data(), 1, bytes);
  Speed("sum of words (plain read)", bytes, [&] { checksum += SumWords(zeros); });
  Zero("zero pages, all zero, portable", zeros, varve::SimdLevel::kPortable);
  Zero("zero pages, all zero, AVX2", zeros, varve::SimdLevel::kAvx2);
  Zero("zero pages, all zero, AVX-512", zeros, varve::SimdLevel::kAvx512);
  Zero("zero pages, none zero, best", ones, varve::BestSimdLevel());
  Speed("crc32c, hardware", bytes, [&] { checksum += varve::Crc32c(1, ones); });
  Speed("crc32c, 4 KiB blocks, hardware", bytes, [&] {
    for (std::size_t i = 0; i < bytes; i += 4096) {
      checksum += varve::Crc32c(100007, ones.subspan(i, 4096));
    }
  });
  Speed("crc32c, portable", bytes, [&] { checksum += varve::Crc32cPortable(1, ones); });
  ::munmap(zeros.data(), bytes);
  ::munmap(ones.data(), bytes);
}

// A 64 GiB guest with one page in `every` dirty.
void Coalesce(std::uint64_t every) {
  const std::uint64_t page_count = (std::uint64_t{64} << 30) / varve::kPageBytes;
  const std::size_t size = varve::BitmapBytes(page_count);
  std::unique_ptr<std::uint8_t[]> memory(new std::uint8_t[size]());
  const varve::Bits bits{memory.get(), size};
  for (std::uint64_t page = 0; page < page_count; page += every) {
    varve::BitmapSetRange(bits, page, 1);
  }
  const varve::Region region{0, page_count * varve::kPageBytes, 0x7f0000000000};
  std::unique_ptr<varve::Row[]> rows(new varve::Row[1024]);
  const double seconds = BestSeconds([&] {
    for (std::uint64_t page = 0; page < page_count;) {
      const auto batch = varve::CoalesceBatch(bits, page_count, {&region, 1}, page,
                                              {4u << 20, 4u << 20, 0}, {rows.get(), 1024});
      page = batch.next_page;
      checksum += batch.bytes;
    }
  });
  std::printf("coalesce 64 GiB, 1 page in %-8" PRIu64 " %9.3f ms\n", every, seconds * 1e3);
}

}  // namespace

int main() {
  Scans("in cache", std::size_t{4} << 20);
  Scans("in memory", std::size_t{256} << 20);
  Coalesce(2);
  Coalesce(256);
  Coalesce(1u << 20);
  std::printf("checksum %016" PRIx64 "\n", checksum);
  return 0;
}
