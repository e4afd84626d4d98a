// What can be wrong with a layer, as a value: which rule, which field, where, and the value found.
#pragma once

#include <cstdint>

namespace varve {

// Kinds are the stable names that the TypeScript face shows. All strings have static storage.
struct LayerFault {
  const char* kind = nullptr;   // null: no fault
  const char* field = "";       // name of the field or area
  std::uint64_t offset = 0;     // bytes, where it is
  std::uint64_t value = 0;      // what was found there
  int error_number = 0;         // errno, for kind layer-io and layer-missing
  std::uint32_t layer = 0;      // position in the stack, bottom = 0

  bool ok() const noexcept { return kind == nullptr; }
};

namespace fault {
inline constexpr const char* kIo = "layer-io";
inline constexpr const char* kMissing = "layer-missing";
inline constexpr const char* kNotALayer = "layer-not-a-layer";
inline constexpr const char* kUnsealed = "layer-unsealed";
inline constexpr const char* kTruncated = "layer-truncated";
inline constexpr const char* kTrailingBytes = "layer-trailing-bytes";
inline constexpr const char* kCorrupt = "layer-corrupt";
inline constexpr const char* kChecksum = "layer-checksum";
inline constexpr const char* kUnsupported = "layer-unsupported";
inline constexpr const char* kTooLarge = "layer-too-large";
inline constexpr const char* kClosed = "layer-closed";
}  // namespace fault

inline LayerFault MakeFault(const char* kind, const char* field, std::uint64_t offset,
                            std::uint64_t value = 0) noexcept {
  return LayerFault{.kind = kind, .field = field, .offset = offset, .value = value};
}

inline LayerFault IoFault(const char* field, std::uint64_t offset, int error_number) noexcept {
  return LayerFault{
      .kind = fault::kIo, .field = field, .offset = offset, .error_number = error_number};
}

}  // namespace varve
