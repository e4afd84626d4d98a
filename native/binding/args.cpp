#include "binding/args.hpp"

#include <climits>
#include <cmath>

namespace varve {
namespace {

constexpr double kSafeIntegerMax = 9007199254740991.0;

}  // namespace

void Args::FailType(const std::string& message) {
  if (!ok_) return;
  ok_ = false;
  Napi::TypeError::New(info_.Env(), message).ThrowAsJavaScriptException();
}

void Args::FailRange(const std::string& message) {
  if (!ok_) return;
  ok_ = false;
  Napi::RangeError::New(info_.Env(), message).ThrowAsJavaScriptException();
}

Args::View Args::Typed(std::size_t index, const char* name, napi_typedarray_type type,
                       const char* type_name) {
  View view;
  if (!ok_) return view;
  napi_typedarray_type actual{};
  // The array buffer is not asked for: over a SharedArrayBuffer it is none.
  const bool matches = info_[index].IsTypedArray() &&
                       napi_get_typedarray_info(info_.Env(), info_[index], &actual, &view.length,
                                                &view.data, nullptr, nullptr) == napi_ok &&
                       actual == type;
  if (!matches) {
    FailType(std::string(name) + " must be a " + type_name);
    return {};
  }
  return view;
}

std::span<std::uint8_t> Args::Bits(std::size_t index, const char* name) {
  const View view = Typed(index, name, napi_uint8_array, "Uint8Array");
  return {static_cast<std::uint8_t*>(view.data), view.length};
}

std::span<std::byte> Args::Bytes(std::size_t index, const char* name) {
  const View view = Typed(index, name, napi_uint8_array, "Uint8Array");
  return {static_cast<std::byte*>(view.data), view.length};
}

Args::View Args::Triples(std::size_t index, const char* name) {
  const View view = Typed(index, name, napi_biguint64_array, "BigUint64Array");
  if (ok_ && view.length % 3 != 0) FailRange(std::string(name) + " must be rows of three");
  return ok_ ? view : View{};
}

std::span<const Row> Args::Rows(std::size_t index, const char* name) {
  const View view = Triples(index, name);
  // SAFETY: Row is three 64-bit words without padding; a BigUint64Array is aligned to 8.
  return {static_cast<const Row*>(view.data), view.length / 3};
}

std::span<const Region> Args::Regions(std::size_t index, const char* name) {
  const View view = Triples(index, name);
  // SAFETY: as for Row.
  return {static_cast<const Region*>(view.data), view.length / 3};
}

std::span<const std::uint32_t> Args::Uint32s(std::size_t index, const char* name) {
  const View view = Typed(index, name, napi_uint32_array, "Uint32Array");
  return {static_cast<const std::uint32_t*>(view.data), view.length};
}

const std::int32_t* Args::CancelWord(std::size_t index, const char* name) {
  const View view = Typed(index, name, napi_int32_array, "Int32Array");
  const std::uint64_t word = Whole(index + 1, "cancelIndex");
  if (ok_ && word >= view.length) FailRange("cancelIndex is outside of cancel");
  return ok_ ? static_cast<const std::int32_t*>(view.data) + word : nullptr;
}

std::uint64_t Args::Whole(std::size_t index, const char* name) {
  if (!ok_) return 0;
  if (!info_[index].IsNumber()) {
    FailType(std::string(name) + " must be a number");
    return 0;
  }
  const double value = info_[index].As<Napi::Number>().DoubleValue();
  if (!(value >= 0 && value <= kSafeIntegerMax) || value != std::floor(value)) {
    FailRange(std::string(name) + " must be a non-negative safe integer");
    return 0;
  }
  return static_cast<std::uint64_t>(value);
}

std::uint64_t Args::WholeAtMost(std::size_t index, const char* name, std::uint64_t max) {
  const std::uint64_t value = Whole(index, name);
  if (ok_ && value > max) FailRange(std::string(name) + " must be at most " + std::to_string(max));
  return ok_ ? value : 0;
}

int Args::Fd(std::size_t index, const char* name) {
  return static_cast<int>(WholeAtMost(index, name, INT_MAX));
}

std::int32_t Args::Pid(std::size_t index, const char* name) {
  const std::uint64_t pid = WholeAtMost(index, name, INT_MAX);
  if (ok_ && pid == 0) FailRange(std::string(name) + " must be a process id");
  return static_cast<std::int32_t>(pid);
}

std::uint32_t Args::Uint32(std::size_t index, const char* name) {
  return static_cast<std::uint32_t>(WholeAtMost(index, name, UINT32_MAX));
}

std::string Args::Text(std::size_t index, const char* name) {
  if (!ok_) return {};
  if (!info_[index].IsString()) {
    FailType(std::string(name) + " must be a string");
    return {};
  }
  return info_[index].As<Napi::String>().Utf8Value();
}

void Put(Napi::Object& object, const char* name, double value) {
  object.Set(name, Napi::Number::New(object.Env(), value));
}

void Put(Napi::Object& object, const char* name, bool value) {
  object.Set(name, Napi::Boolean::New(object.Env(), value));
}

void PutBigInt(Napi::Object& object, const char* name, std::uint64_t value) {
  object.Set(name, Napi::BigInt::New(object.Env(), value));
}

void Export(Napi::Env env, Napi::Object& exports, const char* name,
            Napi::Value (*function)(const Napi::CallbackInfo&)) {
  exports.Set(name, Napi::Function::New(env, function, name));
}

}  // namespace varve
