// Writes rows of an image to a sparse file.
#pragma once

#include <span>

#include "core/layer_reader.hpp"

namespace varve {

// Each data row goes to its image offset; runs of zero pages are left as holes. The file is new:
// what is not written reads as zero.
LayerFault WriteSparse(int fd, std::span<const LayerRow> rows, ConstLayerBytes slab) noexcept;

}  // namespace varve
