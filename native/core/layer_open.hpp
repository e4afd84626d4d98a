// Opens one layer of any accepted shape: raw, ZFile, or either in a tar wrapper.
#pragma once

#include <sys/stat.h>

#include <string>

#include "core/layer_blocks.hpp"
#include "core/layer_lsmt.hpp"
#include "core/layer_tar.hpp"
#include "core/layer_zfile.hpp"
#include "core/unique_fd.hpp"

namespace varve {

// What is known of a layer once it is parsed. The index may have been moved out.
struct ParsedLayer {
  TarBody body;
  bool compressed = false;
  ZFile zfile;  // where compressed
  LsmtLayer lsmt;
};

// Parses tar wrapper, ZFile and LSMT over a source that starts at the file's first byte.
LayerFault ParseLayer(ByteSource& file, ParsedLayer& out) noexcept;

struct OpenedLayer {
  UniqueFd fd;
  std::uint64_t file_bytes = 0;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::uint64_t data_bytes = 0;    // of the index entries
  std::uint64_t zeroed_bytes = 0;
  ParsedLayer parsed;
};

// Opens read-only; regular files only. Blocks on I/O; never throws.
LayerFault OpenLayer(const std::string& path, OpenedLayer& out) noexcept;

}  // namespace varve
