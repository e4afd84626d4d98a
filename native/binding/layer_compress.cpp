// Compressing batches and digests for JavaScript.
#include "core/layer_compress.hpp"

#include "binding/layer_values.hpp"
#include "binding/register.hpp"
#include "core/layer_digest.hpp"

namespace varve {
namespace {

struct CompressRequest {
  std::span<const LayerRow> rows;
  ConstLayerBytes slab;
  LayerBytes out;
  Codec codec;
  std::uint32_t block_bytes;
};

struct CompressOutcome {
  std::uint64_t used = 0;
  std::vector<std::uint32_t> lengths;
};

// { bytes, lengths }, or null where `out` is too small.
Napi::Value CompressedValue(Napi::Env env, CompressOutcome& outcome) {
  if (outcome.used == UINT64_MAX) return env.Null();
  auto lengths = Napi::Uint32Array::New(env, outcome.lengths.size());
  if (lengths.IsEmpty()) return env.Undefined();  // the worker is being terminated
  if (!outcome.lengths.empty()) {
    std::memcpy(lengths.Data(), outcome.lengths.data(), outcome.lengths.size() * 4);
  }
  Napi::Object o = Napi::Object::New(env);
  Put(o, "bytes", static_cast<double>(outcome.used));
  o.Set("lengths", lengths);
  return o;
}

CompressOutcome CompressRows(const CompressRequest& request) {
  CompressOutcome outcome;
  BlockEncoder encoder(request.codec, request.block_bytes, true);
  outcome.used = encoder.EncodeRows(request.rows, request.slab, request.out, outcome.lengths);
  return outcome;
}

CompressRequest CompressArgs(Args& args) {
  CompressRequest request{};
  request.slab = args.Bytes(0, "slab");
  request.rows = LayerRows(args, 1, request.slab, kSectorBytes);
  request.out = args.Bytes(2, "out");
  const std::uint64_t codec = args.WholeAtMost(3, "codec", 2);
  request.block_bytes = args.Uint32(4, "blockBytes");
  if (args.ok() && codec == 0) args.FailRange("codec must compress");
  request.codec = static_cast<Codec>(codec);
  return request;
}

// (slab, rows, out, codec, blockBytes)
Napi::Value CompressNow(const Napi::CallbackInfo& info) {
  Args args(info);
  const CompressRequest request = CompressArgs(args);
  if (!args.ok()) return info.Env().Undefined();
  CompressOutcome outcome = CompressRows(request);
  return CompressedValue(info.Env(), outcome);
}

Napi::Value Compress(const Napi::CallbackInfo& info) {
  Args args(info);
  const CompressRequest request = CompressArgs(args);
  if (!args.ok()) return info.Env().Undefined();
  return LayerJob<CompressOutcome>::Start(info.Env(), {info[0], info[1], info[2]},
                                          [request] { return CompressRows(request); },
                                          CompressedValue);
}

// (codec, blockBytes, length) → bytes
Napi::Value CompressBound(const Napi::CallbackInfo& info) {
  Args args(info);
  const auto codec = static_cast<Codec>(args.WholeAtMost(0, "codec", 2));
  const std::uint32_t block_bytes = args.Uint32(1, "blockBytes");
  const std::uint64_t length = args.Whole(2, "length");
  if (args.ok() && (block_bytes == 0 || block_bytes > kZFileBlockBytesMax)) {
    args.FailRange("no such block size");
  }
  if (!args.ok()) return info.Env().Undefined();
  const std::uint64_t bound = BlockEncoder::Bound(codec, block_bytes, length);
  return Napi::Number::New(info.Env(), static_cast<double>(bound));
}

// A running SHA-256, to be fed by StackReader.hashPart.
Napi::Value NewDigest(const Napi::CallbackInfo& info) {
  return Napi::External<LayerDigest>::New(info.Env(), new LayerDigest,
                                          [](Napi::Env, LayerDigest* done) { delete done; });
}

// (digest) → 64 hex digits; once.
Napi::Value FinishDigest(const Napi::CallbackInfo& info) {
  char hex[65];
  info[0].As<Napi::External<LayerDigest>>().Data()->Finish(hex);
  return Napi::String::New(info.Env(), hex);
}

}  // namespace

void RegisterLayerCompress(Napi::Env env, Napi::Object exports) {
  Export(env, exports, "compressNow", CompressNow);
  Export(env, exports, "compress", Compress);
  Export(env, exports, "compressBound", CompressBound);
  Export(env, exports, "newDigest", NewDigest);
  Export(env, exports, "finishDigest", FinishDigest);
}

}  // namespace varve
