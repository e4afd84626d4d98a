// Shared by the layer bindings: faults as objects, rows as spans, work off the main thread.
#pragma once

#include <napi.h>

#include <functional>
#include <utility>
#include <vector>

#include "binding/args.hpp"
#include "core/layer_fault.hpp"
#include "core/layer_reader.hpp"

namespace varve {

// null where there is no fault.
Napi::Value FaultValue(Napi::Env env, const LayerFault& fault);

// Rows of a batch; throws RangeError unless they are whole units of `unit` bytes inside the slab.
std::span<const LayerRow> LayerRows(Args& args, std::size_t index, ConstLayerBytes slab,
                                    std::uint64_t unit);

// Runs `work` on the thread pool, then resolves with what `convert` makes of its outcome on the
// JavaScript thread. `keep` lists the objects whose memory the work uses.
template <typename Outcome>
class LayerJob final : public Napi::AsyncWorker {
 public:
  using Work = std::function<Outcome()>;
  using Convert = std::function<Napi::Value(Napi::Env, Outcome&)>;

  static Napi::Value Start(Napi::Env env, std::initializer_list<Napi::Value> keep, Work work,
                           Convert convert) {
    auto* job = new LayerJob(env, std::move(work), std::move(convert));
    for (const Napi::Value& value : keep) {
      if (value.IsObject()) job->kept_.push_back(Napi::Persistent(value.As<Napi::Object>()));
    }
    const Napi::Promise promise = job->deferred_.Promise();
    job->Queue();
    return promise;
  }

 protected:
  void Execute() override { outcome_ = work_(); }
  void OnOK() override {
    const Napi::HandleScope scope(Env());
    deferred_.Resolve(convert_(Env(), outcome_));
  }

 private:
  LayerJob(Napi::Env env, Work work, Convert convert)
      : Napi::AsyncWorker(env),
        deferred_(Napi::Promise::Deferred::New(env)),
        work_(std::move(work)),
        convert_(std::move(convert)) {}

  Napi::Promise::Deferred deferred_;
  Work work_;
  Convert convert_;
  Outcome outcome_{};
  std::vector<Napi::ObjectReference> kept_;
};

// The usual case: the outcome is a fault or none.
Napi::Value StartFaultJob(Napi::Env env, std::initializer_list<Napi::Value> keep,
                          std::function<LayerFault()> work);

}  // namespace varve
