// SHA-256 as a stream, by the OpenSSL that the process already has.
#pragma once

#include <array>
#include <cstdint>

#include "core/layer_bytes.hpp"

struct evp_md_ctx_st;

namespace varve {

class LayerDigest {
 public:
  LayerDigest() noexcept;
  ~LayerDigest();
  LayerDigest(const LayerDigest&) = delete;
  LayerDigest& operator=(const LayerDigest&) = delete;

  void Update(ConstLayerBytes bytes) noexcept;
  // Ends the stream. Writes 64 lowercase hex digits and a NUL.
  void Finish(char (&hex)[65]) noexcept;

 private:
  evp_md_ctx_st* context_;
};

}  // namespace varve
