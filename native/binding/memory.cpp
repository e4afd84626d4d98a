#include "binding/args.hpp"
#include "binding/register.hpp"
#include "core/crc32c.hpp"
#include "core/prefault.hpp"
#include "core/zero_scan.hpp"

namespace varve {
namespace {

// (view, bits, level): level 0 is the best there is, 1 portable, 2 AVX2, 3 AVX-512.
Napi::Value ZeroPages(const Napi::CallbackInfo& info) {
  Args args(info);
  const auto view = args.Bytes(0, "view");
  const auto bits = args.Bits(1, "bits");
  const std::uint64_t asked = args.WholeAtMost(2, "level", 3);
  if (args.ok() && view.size() % kPageBytes != 0) args.FailRange("view must be whole pages");
  if (args.ok() && bits.size() != BitmapBytes(view.size() / kPageBytes)) {
    args.FailRange("bits must be one bit a page, in whole 64-bit words");
  }
  if (!args.ok()) return info.Env().Undefined();
  const SimdLevel best = BestSimdLevel();
  const SimdLevel level = asked == 0 ? best : static_cast<SimdLevel>(asked - 1);
  if (level > best) {
    args.FailRange("this processor has no such vectors");
    return info.Env().Undefined();
  }
  FindZeroPages(view, bits, level);
  return info.Env().Undefined();
}

Napi::Value Crc(const Napi::CallbackInfo& info) {
  Args args(info);
  const auto view = args.Bytes(0, "view");
  const std::uint32_t seed = args.Uint32(1, "seed");
  if (!args.ok()) return info.Env().Undefined();
  return Napi::Number::New(info.Env(), Crc32c(seed, view));
}

Napi::Value Advise(const Napi::CallbackInfo& info) {
  Args args(info);
  const auto view = args.Bytes(0, "view");
  if (args.ok()) AdviseHugePages(view);
  return info.Env().Undefined();
}

Napi::Value Touch(const Napi::CallbackInfo& info) {
  Args args(info);
  const auto view = args.Bytes(0, "view");
  if (args.ok()) TouchPages(view);
  return info.Env().Undefined();
}

Napi::Value Address(const Napi::CallbackInfo& info) {
  Args args(info);
  const auto view = args.Bytes(0, "view");
  if (!args.ok()) return info.Env().Undefined();
  return Napi::BigInt::New(info.Env(), reinterpret_cast<std::uint64_t>(view.data()));
}

}  // namespace

void RegisterMemory(Napi::Env env, Napi::Object exports) {
  Export(env, exports, "zeroPages", ZeroPages);
  Export(env, exports, "crc32c", Crc);
  Export(env, exports, "adviseHugePages", Advise);
  Export(env, exports, "touchPages", Touch);
  Export(env, exports, "viewAddress", Address);
}

}  // namespace varve
