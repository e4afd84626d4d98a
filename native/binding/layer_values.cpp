#include "binding/layer_values.hpp"

namespace varve {

Napi::Value FaultValue(Napi::Env env, const LayerFault& fault) {
  if (fault.ok()) return env.Null();
  Napi::Object object = Napi::Object::New(env);
  object.Set("kind", Napi::String::New(env, fault.kind));
  object.Set("field", Napi::String::New(env, fault.field));
  Put(object, "offset", static_cast<double>(fault.offset));
  PutBigInt(object, "value", fault.value);
  Put(object, "errno", static_cast<double>(fault.error_number));
  Put(object, "layer", static_cast<double>(fault.layer));
  return object;
}

std::span<const LayerRow> LayerRows(Args& args, std::size_t index, ConstLayerBytes slab,
                                    std::uint64_t unit) {
  const std::span<const Row> raw = args.Rows(index, "rows");
  // SAFETY: both are three 64-bit words.
  const std::span<const LayerRow> rows(reinterpret_cast<const LayerRow*>(raw.data()), raw.size());
  for (const LayerRow& row : rows) {
    if (row.image_offset % unit != 0 || row.length % unit != 0 ||
        row.length > kVirtualBytesMax || row.image_offset > kVirtualBytesMax - row.length) {
      args.FailRange("a row is not whole units of " + std::to_string(unit) + " bytes");
      return {};
    }
    if (row.slab_offset == kZeroedRow) continue;
    if (row.slab_offset > slab.size() || row.length > slab.size() - row.slab_offset) {
      args.FailRange("a row lies outside of the slab");
      return {};
    }
  }
  return rows;
}

Napi::Value StartFaultJob(Napi::Env env, std::initializer_list<Napi::Value> keep,
                          std::function<LayerFault()> work) {
  return LayerJob<LayerFault>::Start(
      env, keep, std::move(work),
      [](Napi::Env e, LayerFault& fault) { return FaultValue(e, fault); });
}

}  // namespace varve
