#include <fcntl.h>
#include <sys/resource.h>

#include <array>
#include <vector>

#include "check.hpp"
#include "core/bitmap.hpp"
#include "core/file_append.hpp"
#include "core/file_extents.hpp"
#include "core/file_read.hpp"
#include "core/unique_fd.hpp"
#include "fake_syscalls.hpp"

namespace varve::test {
namespace {

UniqueFd TempFile(std::uint64_t bytes) {
  std::array<char, 32> name{"/tmp/varve-test-XXXXXX"};
  UniqueFd fd(::mkostemp(name.data(), O_CLOEXEC));
  CHECK(fd && ::unlink(name.data()) == 0);
  CHECK_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  return fd;
}

std::vector<std::byte> Contents(const UniqueFd& fd) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(::lseek(fd.get(), 0, SEEK_END)));
  CHECK_EQ(::pread(fd.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  return bytes;
}

void RowsOfAFile() {
  Random random(Seed() + 5);
  std::vector<std::byte> bytes(100'000);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random.Next());
  const UniqueFd fd = TempFile(0);
  CHECK_EQ(::pwrite(fd.get(), bytes.data(), bytes.size(), 0), 100'000);
  for (int round = 0; round < 300; ++round) {
    std::vector<Row> rows;
    std::vector<std::byte> expected;
    std::uint64_t at = 0;
    for (std::uint64_t i = random.Below(200); i > 0; --i) {
      if (random.Below(2) == 0) at = random.Below(bytes.size());  // else next to the one before
      const std::uint64_t most = std::min<std::uint64_t>(500, bytes.size() - at + 1);
      const std::uint64_t length = random.Below(most);
      rows.push_back({0, at, length});
      const auto* from = bytes.data() + at;
      expected.insert(expected.end(), from, from + length);
      at += length;
    }
    script = Script{};
    script.shorten = &random;
    script.call_cost_ns = random.Below(2) * (kSliceNs / 2 + 1);
    script.errors = {0, EINTR, 0, EAGAIN};
    std::vector<std::byte> dest(expected.size());
    ReadRequest request{rows, dest, 0, 0, 0};
    request.call_bytes_max = 1 + random.Below(3000);
    ReadOutcome out{};
    while (!out.done) {
      request.from = out.bytes_done;
      out = ReadFileRows(fd.get(), request, Slice(kFake, nullptr), kFake);
      CHECK_EQ(out.error, 0);
    }
    CHECK(dest == expected);
    CHECK(script.bytes_max <= request.call_bytes_max);
  }
}

void NeighboursAreReadTogether() {
  const UniqueFd fd = TempFile(1 << 20);
  std::vector<Row> rows;
  for (std::uint64_t i = 0; i < 200; ++i) rows.push_back({i << 40, i * kPageBytes, kPageBytes});
  std::vector<std::byte> dest(200 * kPageBytes);
  const ReadRequest request{rows, dest, 0, 0, 0};
  const auto out = ReadFileRows(fd.get(), request, Slice(RealSyscalls(), nullptr));
  CHECK(out.done && out.syscalls == 1);
}

void TheEndOfAFileInARowIsEnodata() {
  const UniqueFd fd = TempFile(3 * kPageBytes);
  const std::array rows{Row{0, 0, kPageBytes}, Row{0, 2 * kPageBytes, 2 * kPageBytes}};
  std::vector<std::byte> dest(3 * kPageBytes);
  const ReadRequest request{rows, dest, 0, 0, 0};
  auto out = ReadFileRows(fd.get(), request, Slice(RealSyscalls(), nullptr));
  CHECK_EQ(out.error, ENODATA);
  CHECK_EQ(out.address, 3 * kPageBytes);
  CHECK_EQ(out.bytes_done, 2 * kPageBytes);
  out = ReadFileRows(-1, request, Slice(RealSyscalls(), nullptr));
  CHECK_EQ(out.error, EBADF);
}

struct Pieces {
  std::vector<std::vector<std::byte>> bytes;
  std::vector<iovec> iovecs;
  std::vector<std::byte> joined;

  Pieces(Random& random, std::size_t count) : bytes(count) {
    for (auto& piece : bytes) {
      piece.resize(random.Below(200));
      for (auto& byte : piece) byte = static_cast<std::byte>(random.Next());
      iovecs.push_back({piece.data(), piece.size()});
      joined.insert(joined.end(), piece.begin(), piece.end());
    }
  }
};

void ShortWritesGoOn() {
  Random random(Seed() + 6);
  for (int round = 0; round < 100; ++round) {
    const Pieces pieces(random, random.Below(2600));
    const UniqueFd fd = TempFile(0);
    script = Script{};
    script.shorten = random.Below(4) == 0 ? nullptr : &random;
    script.call_cost_ns = random.Below(2) * (kSliceNs / 2 + 1);
    script.errors = {EINTR, 0, EAGAIN};
    WriteOutcome out{};
    while (!out.done) {
      const std::uint64_t call_bytes_max = 1 + random.Below(100'000);
      script.bytes_max = 0;
      out = WriteAll(fd.get(), pieces.iovecs, 7, out.bytes_done, Slice(kFake, nullptr), kFake,
                     call_bytes_max);
      CHECK_EQ(out.error, 0);
      CHECK(script.bytes_max <= call_bytes_max);
    }
    CHECK_EQ(out.bytes_done, pieces.joined.size());
    if (pieces.joined.empty()) continue;
    auto file = Contents(fd);
    file.erase(file.begin(), file.begin() + 7);
    CHECK(file == pieces.joined);
  }
}

void WritesThatFailSaySo() {
  std::vector<std::byte> bytes(64 * kPageBytes, std::byte{1});
  const iovec all{bytes.data(), bytes.size()};
  const UniqueFd full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  CHECK(static_cast<bool>(full));
  auto out = WriteAll(full.get(), {&all, 1}, 0, 0, Slice(RealSyscalls(), nullptr));
  CHECK_EQ(out.error, ENOSPC);
  CHECK_EQ(out.bytes_done, 0u);

  // A real short write: the file may grow to ten pages and a half. What fits is counted.
  InChild([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{10 * kPageBytes + 2048, RLIM_INFINITY};
    CHECK_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    const UniqueFd fd = TempFile(0);
    const auto cut = WriteAll(fd.get(), {&all, 1}, 0, 0, Slice(RealSyscalls(), nullptr));
    CHECK_EQ(cut.error, EFBIG);
    CHECK_EQ(cut.bytes_done, 10 * kPageBytes + 2048);
    CHECK_EQ(cut.syscalls, 2u);
  });

  // A kernel that takes nothing and says nothing would be asked for ever.
  script = Script{};
  script.move_nothing = true;
  out = WriteAll(full.get(), {&all, 1}, 0, 0, Slice(kFake, nullptr), kFake);
  CHECK(out.error == EIO && out.syscalls == 1);

  std::int32_t word = 1;
  out = WriteAll(full.get(), {&all, 1}, 0, 0, Slice(RealSyscalls(), &word));
  CHECK(out.cancelled && out.syscalls == 0);
}

std::vector<std::uint8_t> Extents(const UniqueFd& fd, std::uint64_t page_count) {
  std::vector<std::uint8_t> bits(BitmapBytes(page_count));
  ScanOutcome out{};
  // No time at all: one extent a call.
  while (!out.done) {
    out = ScanFileExtents(fd.get(), out.next, page_count, bits, Slice(RealSyscalls(), nullptr, 0));
  }
  CHECK_EQ(out.error, 0);
  return bits;
}

void ExtentsAreWhatWasWritten() {
  Random random(Seed() + 7);
  constexpr std::uint64_t kPages = 2000;
  const UniqueFd fd = TempFile(kPages * kPageBytes);
  std::vector<std::uint8_t> expected(BitmapBytes(kPages));
  CHECK(Extents(fd, kPages) == expected);
  const std::vector<std::byte> page(kPageBytes, std::byte{1});
  for (int i = 0; i < 40; ++i) {
    const std::uint64_t at = i == 0 ? 0 : i == 1 ? kPages - 1 : random.Below(kPages);
    const auto offset = static_cast<off_t>(at * kPageBytes);
    CHECK_EQ(::pwrite(fd.get(), page.data(), kPageBytes, offset), 4096);
    BitmapSetRange(expected, at, 1);
  }
  CHECK(Extents(fd, kPages) == expected);
  // Fewer pages than the file has: nothing past them.
  BitmapClearRange(expected, 1000, 1000);
  expected.resize(BitmapBytes(1000));
  CHECK(Extents(fd, 1000) == expected);
  // A file that ends inside a page: the page counts.
  const UniqueFd odd = TempFile(0);
  CHECK_EQ(::pwrite(odd.get(), "x", 1, kPageBytes), 1);
  CHECK_EQ(BitmapNextSet(Extents(odd, 10), 1, 10), 1u);
  CHECK_EQ(BitmapNextSet(Extents(odd, 10), 2, 10), 10u);
}

void ExtentsOfWhatIsNoFile() {
  std::array<std::uint8_t, 8> bits{};
  CHECK_EQ(ScanFileExtents(-1, 0, 8, bits, Slice(RealSyscalls(), nullptr)).error, EBADF);
  int ends[2];
  CHECK_EQ(::pipe(ends), 0);
  const UniqueFd reader(ends[0]);
  const UniqueFd writer(ends[1]);
  CHECK_EQ(ScanFileExtents(reader.get(), 0, 8, bits, Slice(RealSyscalls(), nullptr)).error, ESPIPE);
}

constexpr std::array kFacts{
    Fact{"file: rows arrive packed, whatever the cut", RowsOfAFile},
    Fact{"file: neighbours are read together", NeighboursAreReadTogether},
    Fact{"file: the end of a file in a row is ENODATA", TheEndOfAFileInARowIsEnodata},
    Fact{"file: short writes go on, whatever the cut", ShortWritesGoOn},
    Fact{"file: writes that fail say so", WritesThatFailSaySo},
    Fact{"file: extents are what was written", ExtentsAreWhatWasWritten},
    Fact{"file: extents of what is no file", ExtentsOfWhatIsNoFile},
};

}  // namespace

std::span<const Fact> FileFacts() { return kFacts; }

}  // namespace varve::test
