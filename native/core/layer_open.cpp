#include "core/layer_open.hpp"

#include <fcntl.h>

#include <array>
#include <cerrno>

namespace varve {

LayerFault ParseLayer(ByteSource& file, ParsedLayer& out) noexcept {
  out.body = FindTarBody(file);
  if (!out.body.fault.ok()) return out.body.fault;
  WindowSource body(file, out.body.offset, out.body.size);
  std::array<std::byte, 24> first;
  if (body.size() < first.size()) return MakeFault(fault::kNotALayer, "size", 0, body.size());
  if (auto f = body.Read(0, first); !f.ok()) return f;
  out.compressed = IsZFile(first);
  if (!out.compressed) return ReadLsmt(body, out.lsmt);
  if (auto f = ReadZFile(body, out.zfile); !f.ok()) return f;
  const ZFileTable table = out.zfile.Table();
  BlockDecoder decoder;
  ZFileSource content(body, table, decoder);
  return ReadLsmt(content, out.lsmt);
}

LayerFault OpenLayer(const std::string& path, OpenedLayer& out) noexcept {
  // O_NONBLOCK: a FIFO must not hang the open; it has no effect on regular files.
  out.fd.Reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!out.fd) {
    LayerFault f = IoFault("open", 0, errno);
    if (f.error_number == ENOENT || f.error_number == ENOTDIR) f.kind = fault::kMissing;
    return f;
  }
  struct stat info;
  if (::fstat(out.fd.get(), &info) != 0) return IoFault("fstat", 0, errno);
  if (!S_ISREG(info.st_mode)) return MakeFault(fault::kNotALayer, "file type", 0, info.st_mode);
  out.file_bytes = static_cast<std::uint64_t>(info.st_size);
  out.device = info.st_dev;
  out.inode = info.st_ino;
  FileSource file(out.fd.get(), 0, out.file_bytes);
  if (auto f = ParseLayer(file, out.parsed); !f.ok()) return f;
  for (const IndexEntry& entry : out.parsed.lsmt.entries) {
    (entry.zeroed() ? out.zeroed_bytes : out.data_bytes) += entry.length() * kSectorBytes;
  }
  return {};
}

}  // namespace varve
