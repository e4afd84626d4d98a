// The tar wrapper around some layers (FORMAT.md section 3).
#pragma once

#include <cstdint>

#include "core/layer_source.hpp"

namespace varve {

struct TarBody {
  bool wrapped = false;      // false: the file is no tar; the body is the whole file
  std::uint64_t offset = 0;  // bytes, of the body within the file
  std::uint64_t size = 0;    // bytes
  LayerFault fault;
};

// Finds the body: after `overlaybd.pax` and `overlaybd.commit` headers, or after one plain ustar
// header. Header checksums, sizes and names are checked; a tar that holds no layer is a fault.
TarBody FindTarBody(ByteSource& file) noexcept;

}  // namespace varve
