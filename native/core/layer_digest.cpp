#include "core/layer_digest.hpp"

#include <openssl/evp.h>

#include <cstdlib>

namespace varve {
namespace {

// SHA-256 is always there; only lack of memory could make these fail.
void Require(bool ok) noexcept {
  if (!ok) std::abort();
}

}  // namespace

LayerDigest::LayerDigest() noexcept : context_(EVP_MD_CTX_new()) {
  Require(context_ != nullptr && EVP_DigestInit_ex(context_, EVP_sha256(), nullptr) == 1);
}

LayerDigest::~LayerDigest() { EVP_MD_CTX_free(context_); }

void LayerDigest::Update(ConstLayerBytes bytes) noexcept {
  Require(EVP_DigestUpdate(context_, bytes.data(), bytes.size()) == 1);
}

void LayerDigest::Finish(char (&hex)[65]) noexcept {
  unsigned char raw[EVP_MAX_MD_SIZE];
  unsigned int length = 0;
  Require(EVP_DigestFinal_ex(context_, raw, &length) == 1 && length == 32);
  constexpr char kDigits[] = "0123456789abcdef";
  for (unsigned i = 0; i < 32; ++i) {
    hex[2 * i] = kDigits[raw[i] >> 4];
    hex[2 * i + 1] = kDigits[raw[i] & 15];
  }
  hex[64] = '\0';
}

}  // namespace varve
