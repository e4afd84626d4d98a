// The addon: stateless, so that the main thread and any number of workers may load it, side by side
// and over and over. A worker may be terminated while a function here runs: every call into
// JavaScript that follows fails, so what makes an array must look whether it got one. State of a
// later binding hangs off the env (SetInstanceData), never off statics.
#include <napi.h>

#include "binding/args.hpp"
#include "binding/register.hpp"
#include "core/units.hpp"

namespace {

Napi::Object Init(Napi::Env env, Napi::Object exports) {
  Napi::Object abi = Napi::Object::New(env);
  varve::Put(abi, "version", static_cast<double>(varve::kAbiVersion));
  varve::Put(abi, "rowBytes", static_cast<double>(sizeof(varve::Row)));
  varve::Put(abi, "regionBytes", static_cast<double>(sizeof(varve::Region)));
  exports.Set("abi", abi);
  varve::RegisterBitmap(env, exports);
  varve::RegisterFiles(env, exports);
  varve::RegisterGuest(env, exports);
  varve::RegisterMemory(env, exports);
  varve::RegisterProcess(env, exports);
  varve::RegisterScan(env, exports);
  varve::RegisterThreads(env, exports);
  varve::RegisterLayerCompress(env, exports);
  varve::RegisterLayerReader(env, exports);
  varve::RegisterLayerSink(env, exports);
  return exports;
}

}  // namespace

NODE_API_MODULE(varve, Init)
