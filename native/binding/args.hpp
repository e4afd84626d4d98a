// Checked arguments of a native function. The first one that is wrong throws, and the rest are not
// looked at: a function asks for all of them, then returns at once unless ok().
#pragma once

#include <napi.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/units.hpp"

namespace varve {

class Args {
 public:
  explicit Args(const Napi::CallbackInfo& info) noexcept : info_(info) {}

  bool ok() const noexcept { return ok_; }

  // Views of a Uint8Array's memory, over an ArrayBuffer or a SharedArrayBuffer.
  // SAFETY: valid while the call runs, which keeps its arguments alive; never kept.
  std::span<std::uint8_t> Bits(std::size_t index, const char* name);
  std::span<std::byte> Bytes(std::size_t index, const char* name);
  // A BigUint64Array in rows of three.
  std::span<const Row> Rows(std::size_t index, const char* name);
  std::span<const Region> Regions(std::size_t index, const char* name);
  std::span<const std::uint32_t> Uint32s(std::size_t index, const char* name);
  // Element `word_index` (the next argument) of an Int32Array.
  const std::int32_t* CancelWord(std::size_t index, const char* name);
  // A non-negative integer up to 2^53 - 1.
  std::uint64_t Whole(std::size_t index, const char* name);
  std::uint64_t WholeAtMost(std::size_t index, const char* name, std::uint64_t max);
  int Fd(std::size_t index, const char* name);
  std::int32_t Pid(std::size_t index, const char* name);
  std::uint32_t Uint32(std::size_t index, const char* name);
  std::string Text(std::size_t index, const char* name);

  // Fail with a reason of the caller's.
  void FailType(const std::string& message);
  void FailRange(const std::string& message);

 private:
  struct View {
    void* data = nullptr;
    std::size_t length = 0;  // elements
  };
  View Typed(std::size_t index, const char* name, napi_typedarray_type type,
             const char* type_name);
  View Triples(std::size_t index, const char* name);

  const Napi::CallbackInfo& info_;
  bool ok_ = true;
};

// Sets properties of a result object, without the exceptions machinery.
void Put(Napi::Object& object, const char* name, double value);
void Put(Napi::Object& object, const char* name, bool value);
void PutBigInt(Napi::Object& object, const char* name, std::uint64_t value);

// Register one function.
void Export(Napi::Env env, Napi::Object& exports, const char* name,
            Napi::Value (*function)(const Napi::CallbackInfo&));

}  // namespace varve
