// Little-endian fields of a byte span. Callers check bounds before they load or store.
#pragma once

#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace varve {

static_assert(std::endian::native == std::endian::little, "fields are copied as they are");

using LayerBytes = std::span<std::byte>;
using ConstLayerBytes = std::span<const std::byte>;

template <typename T>
T LoadField(ConstLayerBytes bytes, std::size_t offset) noexcept {
  assert(offset + sizeof(T) <= bytes.size());
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

template <typename T>
void StoreField(LayerBytes bytes, std::size_t offset, T value) noexcept {
  assert(offset + sizeof(T) <= bytes.size());
  std::memcpy(bytes.data() + offset, &value, sizeof(T));
}

}  // namespace varve
