// Tar wrapper: any bytes either are no tar, are a fault, or name a body inside the file.
#include <cstdlib>

#include "core/layer_tar.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  varve::MemorySource file(std::as_bytes(std::span(data, size)));
  const varve::TarBody body = varve::FindTarBody(file);
  if (!body.fault.ok()) return 0;
  if (body.offset > size || body.size > size - body.offset) std::abort();
  return 0;
}
