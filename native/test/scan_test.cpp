#include <array>
#include <vector>

#include "check.hpp"
#include "core/bitmap.hpp"
#include "core/crc32c.hpp"
#include "core/pagemap.hpp"
#include "core/prefault.hpp"
#include "core/zero_scan.hpp"

namespace varve::test {
namespace {

std::span<const std::byte> AsBytes(const char* text) {
  return std::as_bytes(std::span(text, std::strlen(text)));
}

void OneSetBitAnywhereMakesAPageNotZero() {
  Random random(Seed() + 2);
  // One byte off, so that no level may count on alignment.
  Mapping memory(10 * kPageBytes);
  const std::span<std::byte> pages = memory.span().subspan(1, 9 * kPageBytes);
  for (int round = 0; round < 300; ++round) {
    std::array<std::uint8_t, 8> expected{};
    BitmapSetRange(expected, 0, 9);
    std::memset(memory.data(), 0, memory.size());
    memory.data()[0] = std::byte{0xff};
    memory.data()[9 * kPageBytes + 1] = std::byte{0xff};
    for (std::uint64_t i = random.Below(6); i > 0; --i) {
      const std::uint64_t at = random.Below(pages.size());
      pages[at] = static_cast<std::byte>(1u << random.Below(8));
      BitmapClearRange(expected, at / kPageBytes, 1);
    }
    for (const auto level : {SimdLevel::kPortable, SimdLevel::kAvx2, SimdLevel::kAvx512}) {
      if (level > BestSimdLevel()) continue;
      std::array<std::uint8_t, 8> found;
      found.fill(0xff);
      FindZeroPages(pages, found, level);
      CHECK(found == expected);
    }
  }
}

std::uint32_t BitByBit(std::uint32_t crc, std::span<const std::byte> bytes) {
  for (const std::byte byte : bytes) {
    crc ^= static_cast<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0);
  }
  return crc;
}

void ChecksumsOfTheFormatNotes() {
  CHECK_EQ(Crc32c(0, AsBytes("123456789")), 0x58e3fa20u);
  CHECK_EQ(Crc32c(100007, AsBytes("123456789")), 0x3c9bd4e0u);
  CHECK_EQ(Crc32cPortable(100007, AsBytes("123456789")), 0x3c9bd4e0u);
  CHECK_EQ(~Crc32c(~0u, AsBytes("123456789")), 0xe3069283u);  // the standard CRC-32C
}

void ChecksumsOfEveryLength() {
  Random random(Seed() + 3);
  std::vector<std::byte> bytes(12300);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random.Next());
  for (std::size_t length = 0; length < bytes.size(); length += 1 + random.Below(37)) {
    const auto part = std::span(bytes).subspan(random.Below(bytes.size() - length), length);
    const auto seed = static_cast<std::uint32_t>(random.Next());
    const std::uint32_t expected = BitByBit(seed, part);
    CHECK_EQ(Crc32c(seed, part), expected);
    CHECK_EQ(Crc32cPortable(seed, part), expected);
    const std::size_t cut = random.Below(length + 1);
    CHECK_EQ(Crc32c(Crc32c(seed, part.first(cut)), part.subspan(cut)), expected);
  }
}

void PagemapOf(const Mapping& memory, std::span<const std::uint64_t> expected, PagemapMode mode) {
  const std::uint64_t pages = memory.size() / kPageBytes;
  // Two regions that meet inside the memory, so that image pages and addresses differ.
  const std::array regions{Region{0, 65 * kPageBytes, memory.address()},
                           Region{65 * kPageBytes, memory.size() - 65 * kPageBytes,
                                  memory.address() + 65 * kPageBytes}};
  int error = 0;
  const UniqueFd pagemap = OpenPagemap(::getpid(), error);
  CHECK_EQ(error, 0);
  for (const auto method : {PreferredPagemapMethod(pagemap), PagemapMethod::kPread}) {
    std::vector<std::uint8_t> bits(BitmapBytes(pages));
    // No time at all: one step a call, so that going on is tested too.
    PagemapOutcome out{0, 0, false};
    while (!out.done && out.error == 0) {
      out = ScanPagemap(pagemap, regions, out.next_page, mode, method, bits,
                        Slice(RealSyscalls(), nullptr, 0));
    }
    CHECK_EQ(out.error, 0);
    CHECK_EQ(BitmapCount(bits), expected.size());
    for (const std::uint64_t page : expected) {
      CHECK_EQ(BitmapNextSet(bits, page, pages), page);
    }
  }
}

void ResidentPagesAreTheTouchedOnes() {
  Mapping memory(1000 * kPageBytes);
  const std::array<std::uint64_t, 4> touched{0, 64, 65, 999};
  for (const std::uint64_t page : touched) memory.data()[page * kPageBytes] = std::byte{1};
  PagemapOf(memory, touched, PagemapMode::kResident);
  PagemapOf(memory, touched, PagemapMode::kPrivate);
}

void PrivatePagesOfAFileAreTheWrittenOnes() {
  std::FILE* file = std::tmpfile();
  CHECK(file != nullptr);
  CHECK_EQ(::ftruncate(::fileno(file), 100 * static_cast<off_t>(kPageBytes)), 0);
  Mapping memory(100 * kPageBytes);
  void* mapped = ::mmap(memory.data(), memory.size(), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_FIXED, ::fileno(file), 0);
  CHECK(mapped == memory.data());
  // Plain accesses, through volatile: the reads must happen.
  volatile auto* bytes = reinterpret_cast<volatile std::uint8_t*>(memory.data());
  std::uint64_t sum = 0;
  for (std::uint64_t page = 0; page < 50; ++page) sum += bytes[page * kPageBytes];
  CHECK_EQ(sum, 0u);
  const std::array<std::uint64_t, 3> written{3, 64, 80};
  for (const std::uint64_t page : written) bytes[page * kPageBytes] = 1;
  PagemapOf(memory, written, PagemapMode::kPrivate);
  std::fclose(file);
}

void AnUnmappedRangeMatchesNothing() {
  Mapping memory(200 * kPageBytes);
  memory.data()[0] = std::byte{1};
  memory.data()[150 * kPageBytes] = std::byte{1};
  ::munmap(memory.data() + 100 * kPageBytes, 20 * kPageBytes);
  PagemapOf(memory, std::array<std::uint64_t, 2>{0, 150}, PagemapMode::kResident);
}

void PagemapOfNobodyIsEsrch() {
  int error = 0;
  const UniqueFd pagemap = OpenPagemap(0x3fffffff, error);
  CHECK(!pagemap);
  CHECK_EQ(error, ESRCH);
}

void TouchingKeepsContentsAndMakesPagesResident() {
  Mapping memory(70 * kPageBytes);
  memory.data()[5 * kPageBytes + 7] = std::byte{9};
  AdviseHugePages(memory.span());
  TouchPages(memory.span().subspan(1, memory.size() - 2));
  CHECK(memory.data()[5 * kPageBytes + 7] == std::byte{9});
  int error = 0;
  const UniqueFd pagemap = OpenPagemap(::getpid(), error);
  const Region region{0, memory.size(), memory.address()};
  std::vector<std::uint8_t> bits(BitmapBytes(70));
  ScanPagemap(pagemap, {&region, 1}, 0, PagemapMode::kResident, PagemapMethod::kPread, bits,
              Slice(RealSyscalls(), nullptr));
  CHECK_EQ(BitmapCount(bits), 70u);
  TouchPages({});
  AdviseHugePages({});
}

constexpr std::array kFacts{
    Fact{"one set bit anywhere makes a page not zero", OneSetBitAnywhereMakesAPageNotZero},
    Fact{"crc: checksums of the format notes", ChecksumsOfTheFormatNotes},
    Fact{"crc: checksums of every length, seed, and cut", ChecksumsOfEveryLength},
    Fact{"pagemap: resident pages are the touched ones", ResidentPagesAreTheTouchedOnes},
    Fact{"pagemap: private pages of a file are the written ones",
         PrivatePagesOfAFileAreTheWrittenOnes},
    Fact{"pagemap: an unmapped range matches nothing", AnUnmappedRangeMatchesNothing},
    Fact{"pagemap: nobody is ESRCH", PagemapOfNobodyIsEsrch},
    Fact{"touching keeps contents and makes pages resident",
         TouchingKeepsContentsAndMakesPagesResident},
};

}  // namespace

std::span<const Fact> ScanFacts() { return kFacts; }

}  // namespace varve::test
