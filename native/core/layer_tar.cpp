#include "core/layer_tar.hpp"

#include <array>
#include <string_view>
#include <vector>

namespace varve {
namespace {

constexpr std::size_t kBlockBytes = 512;
// Records of one pax header: a few names and times besides the size.
constexpr std::uint64_t kPaxBytesMax = 64 * 1024;
constexpr std::size_t kModeOffset = 100;
constexpr std::size_t kSizeOffset = 124;
constexpr std::size_t kSumOffset = 148;
constexpr std::size_t kTypeOffset = 156;
constexpr std::size_t kMagicOffset = 257;
// Zero blocks that may end the archive; writers pad to a record of 20 blocks.
constexpr std::uint64_t kEndBytesMax = 20 * kBlockBytes;

#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
constexpr bool kChecksSum = false;  // so that the fuzzer gets past it
#else
constexpr bool kChecksSum = true;
#endif

using Block = std::array<std::byte, kBlockBytes>;

std::string_view Text(const Block& block, std::size_t offset, std::size_t length) noexcept {
  // SAFETY: a view of the caller's block; char may alias std::byte.
  std::string_view text(reinterpret_cast<const char*>(block.data()) + offset, length);
  return text.substr(0, text.find('\0'));
}

// Digits in `base`, blanks around them; false on anything else or on overflow.
bool ParseDigits(std::string_view text, unsigned base, std::uint64_t& value) noexcept {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  value = 0;
  if (text.empty()) return false;
  for (const char c : text) {
    const unsigned digit = static_cast<unsigned>(c) - '0';
    if (digit >= base || value > (UINT64_MAX - digit) / base) return false;
    value = value * base + digit;
  }
  return true;
}

bool IsUstar(const Block& block) noexcept {
  return Text(block, kMagicOffset, 6).substr(0, 5) == "ustar";
}

bool SumMatches(const Block& block) noexcept {
  std::uint64_t stored = 0;
  if (!ParseDigits(Text(block, kSumOffset, 8), 8, stored)) return false;
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < kBlockBytes; ++i) {
    const bool in_field = i >= kSumOffset && i < kSumOffset + 8;
    sum += in_field ? static_cast<std::uint64_t>(' ') : std::to_integer<std::uint64_t>(block[i]);
  }
  return !kChecksSum || sum == stored;
}

// The value of the `size` record, where there is one; records are "LENGTH KEY=VALUE\n".
bool PaxSize(std::string_view records, std::uint64_t& size) noexcept {
  bool found = false;
  while (!records.empty()) {
    const std::size_t space = records.find(' ');
    std::uint64_t length = 0;
    if (space == std::string_view::npos || !ParseDigits(records.substr(0, space), 10, length)) {
      return false;
    }
    if (length <= space + 1 || length > records.size()) return false;
    std::string_view record = records.substr(space + 1, length - space - 1);
    if (record.empty() || record.back() != '\n') return false;
    record.remove_suffix(1);
    // The last one counts.
    if (record.starts_with("size=")) {
      if (!ParseDigits(record.substr(5), 10, size)) return false;
      found = true;
    }
    records.remove_prefix(length);
  }
  return found;
}

TarBody Bad(const char* kind, const char* field, std::uint64_t offset, std::uint64_t value) {
  TarBody body;
  body.wrapped = true;
  body.fault = MakeFault(kind, field, offset, value);
  return body;
}

// Checks that the body fits, and that only the archive's end follows it.
TarBody Bounded(std::uint64_t file_size, std::uint64_t offset, std::uint64_t size) noexcept {
  if (offset > file_size || size > file_size - offset) {
    return Bad(fault::kTruncated, "tar.size", offset, size);
  }
  if (size == 0) return Bad(fault::kNotALayer, "tar.size", offset, 0);
  if (file_size - offset - size > kEndBytesMax + kBlockBytes) {
    return Bad(fault::kTrailingBytes, "tar.end", offset + size, file_size);
  }
  TarBody body;
  body.wrapped = true;
  body.offset = offset;
  body.size = size;
  return body;
}

}  // namespace

TarBody FindTarBody(ByteSource& file) noexcept {
  TarBody whole;
  whole.size = file.size();
  Block block;
  if (file.size() < kBlockBytes) return whole;
  if (whole.fault = file.Read(0, block); !whole.fault.ok() || !IsUstar(block)) return whole;
  if (!SumMatches(block)) return Bad(fault::kCorrupt, "tar.checksum", kSumOffset, 0);
  std::uint64_t own_size = 0;
  if (!ParseDigits(Text(block, kSizeOffset, 12), 8, own_size)) {
    return Bad(fault::kCorrupt, "tar.size", kSizeOffset, 0);
  }
  const auto type = std::to_integer<char>(block[kTypeOffset]);
  if (type != 'x') {
    if (type != '0' && type != '\0') return Bad(fault::kNotALayer, "tar.type", kTypeOffset, type);
    return Bounded(file.size(), kBlockBytes, own_size);
  }
  // Whatever the pax header is called: each writer names it as it likes.
  if (own_size == 0 || own_size > kPaxBytesMax) {
    return Bad(fault::kUnsupported, "tar.pax-size", kSizeOffset, own_size);
  }
  const std::uint64_t blocks = (own_size + kBlockBytes - 1) / kBlockBytes;
  const std::uint64_t second = kBlockBytes + blocks * kBlockBytes;
  if (file.size() < second + kBlockBytes) return Bad(fault::kTruncated, "tar", 0, file.size());
  std::vector<std::byte> records(own_size);
  if (auto f = file.Read(kBlockBytes, records); !f.ok()) return Bad(f.kind, f.field, f.offset, 0);
  std::uint64_t size = 0;
  // SAFETY: a view of the bytes just read; char may alias std::byte.
  if (!PaxSize({reinterpret_cast<const char*>(records.data()), records.size()}, size)) {
    return Bad(fault::kCorrupt, "tar.pax-records", kBlockBytes, 0);
  }
  if (auto f = file.Read(second, block); !f.ok()) return Bad(f.kind, f.field, f.offset, 0);
  if (!IsUstar(block) || !SumMatches(block)) {
    return Bad(fault::kCorrupt, "tar.checksum", second + kSumOffset, 0);
  }
  if (Text(block, 0, kModeOffset) != "overlaybd.commit") {
    return Bad(fault::kNotALayer, "tar.name", second, 0);
  }
  return Bounded(file.size(), second + kBlockBytes, size);
}

}  // namespace varve
