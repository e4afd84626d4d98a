// LayerSink for JavaScript: each method that does I/O returns a promise of a fault or null.
#include "core/layer_sink.hpp"

#include <memory>

#include "binding/layer_values.hpp"
#include "binding/register.hpp"

namespace varve {
namespace {

class SinkBinding final : public Napi::ObjectWrap<SinkBinding> {
 public:
  static void Register(Napi::Env env, Napi::Object exports) {
    exports.Set("LayerSink",
                DefineClass(env, "LayerSink",
                            {InstanceMethod<&SinkBinding::Open>("open"),
                             InstanceMethod<&SinkBinding::Stage>("stage"),
                             InstanceMethod<&SinkBinding::StageBlocks>("stageBlocks"),
                             InstanceMethod<&SinkBinding::Supersede>("supersede"),
                             InstanceMethod<&SinkBinding::Write>("write"),
                             InstanceMethod<&SinkBinding::Hash>("hash"),
                             InstanceMethod<&SinkBinding::Finish>("finish"),
                             InstanceMethod<&SinkBinding::Sync>("sync"),
                             InstanceMethod<&SinkBinding::HashFile>("hashFile"),
                             InstanceMethod<&SinkBinding::Publish>("publish"),
                             InstanceMethod<&SinkBinding::Abandon>("abandon"),
                             InstanceMethod<&SinkBinding::Totals>("totals")}));
  }

  // (path, tempPath, uuid, parentUuid or "", virtualBytes, codec, blockBytes, userTag)
  explicit SinkBinding(const Napi::CallbackInfo& info) : Napi::ObjectWrap<SinkBinding>(info) {
    Args args(info);
    SinkOptions options;
    options.path = args.Text(0, "path");
    options.temp_path = args.Text(1, "tempPath");
    const std::string uuid = args.Text(2, "uuid");
    const std::string parent = args.Text(3, "parentUuid");
    options.header.virtual_bytes = args.WholeAtMost(4, "virtualBytes", kVirtualBytesMax);
    options.codec = static_cast<Codec>(args.WholeAtMost(5, "codec", 2));
    options.block_bytes = args.Uint32(6, "blockBytes");
    const std::string tag = args.Text(7, "userTag");
    if (args.ok() && (uuid.size() != 36 || !ParseUuid(uuid.data(), options.header.uuid))) {
      args.FailRange("uuid is not a UUID");
    }
    if (args.ok() && !parent.empty() &&
        (parent.size() != 36 || !ParseUuid(parent.data(), options.header.parent_uuid))) {
      args.FailRange("parentUuid is not a UUID");
    }
    if (args.ok() && tag.size() > 255) args.FailRange("userTag takes at most 255 bytes");
    if (!args.ok()) return;
    tag.copy(options.header.user_tag.data(), tag.size());
    sink_ = std::make_shared<LayerSink>(std::move(options));
  }

 private:
  Napi::Value Run(const Napi::CallbackInfo& info, LayerFault (LayerSink::*step)() noexcept) {
    return StartFaultJob(info.Env(), {}, [sink = sink_, step] { return (*sink.*step)(); });
  }
  Napi::Value Open(const Napi::CallbackInfo& info) { return Run(info, &LayerSink::Open); }
  Napi::Value Finish(const Napi::CallbackInfo& info) { return Run(info, &LayerSink::Finish); }
  Napi::Value Sync(const Napi::CallbackInfo& info) { return Run(info, &LayerSink::Sync); }
  Napi::Value HashFile(const Napi::CallbackInfo& info) { return Run(info, &LayerSink::HashFile); }
  Napi::Value Publish(const Napi::CallbackInfo& info) { return Run(info, &LayerSink::Publish); }
  Napi::Value Abandon(const Napi::CallbackInfo& info) {
    return StartFaultJob(info.Env(), {}, [sink = sink_] {
      sink->Abandon();
      return LayerFault{};
    });
  }

  static Napi::Value Wrap(Napi::Env env, std::unique_ptr<StagedBatch> batch) {
    return Napi::External<StagedBatch>::New(env, batch.release(),
                                            [](Napi::Env, StagedBatch* done) { delete done; });
  }

  // (slab, rows) → staged batch. The caller keeps the slab until write and hash are done.
  Napi::Value Stage(const Napi::CallbackInfo& info) {
    Args args(info);
    const ConstLayerBytes slab = args.Bytes(0, "slab");
    const auto rows = LayerRows(args, 1, slab, kSectorBytes);
    if (args.ok() && sink_->compressed()) args.FailType("this layer takes compressed blocks");
    if (!args.ok()) return info.Env().Undefined();
    auto batch = std::make_unique<StagedBatch>();
    sink_->StageRaw(rows, slab, *batch);
    return Wrap(info.Env(), std::move(batch));
  }

  // (slab, rows, blocks, lengths) → staged batch.
  Napi::Value StageBlocks(const Napi::CallbackInfo& info) {
    Args args(info);
    const ConstLayerBytes slab = args.Bytes(0, "slab");
    const auto rows = LayerRows(args, 1, slab, kSectorBytes);
    const ConstLayerBytes blocks = args.Bytes(2, "blocks");
    const auto lengths = args.Uint32s(3, "lengths");
    if (args.ok() && !sink_->compressed()) args.FailType("this layer takes raw bytes");
    std::uint64_t data = 0;
    std::uint64_t stored = 0;
    for (const LayerRow& row : rows) data += row.slab_offset == kZeroedRow ? 0 : row.length;
    for (const std::uint32_t length : lengths) stored += length;
    if (args.ok() && (stored != blocks.size() || !sink_->BlocksHold(lengths.size(), data))) {
      args.FailRange("the blocks do not hold the rows' bytes");
    }
    if (!args.ok()) return info.Env().Undefined();
    auto batch = std::make_unique<StagedBatch>();
    sink_->StageBlocks(rows, blocks, lengths, *batch);
    return Wrap(info.Env(), std::move(batch));
  }

  // () → fault or null. On the caller's thread, as `stage`: it comes between two of them.
  Napi::Value Supersede(const Napi::CallbackInfo& info) {
    const LayerFault f = sink_->Supersede();
    return f.ok() ? info.Env().Null() : FaultValue(info.Env(), f);
  }

  // (staged batch, slab): the slab is what the batch's parts point into.
  Napi::Value Write(const Napi::CallbackInfo& info) {
    const StagedBatch* batch = info[0].As<Napi::External<StagedBatch>>().Data();
    return StartFaultJob(info.Env(), {info[0], info[1]},
                         [sink = sink_, batch] { return sink->Write(*batch); });
  }

  Napi::Value Hash(const Napi::CallbackInfo& info) {
    const StagedBatch* batch = info[0].As<Napi::External<StagedBatch>>().Data();
    return StartFaultJob(info.Env(), {info[0], info[1]}, [sink = sink_, batch] {
      sink->Hash(*batch);
      return LayerFault{};
    });
  }

  Napi::Value Totals(const Napi::CallbackInfo& info) {
    const SinkTotals& totals = sink_->totals();
    Napi::Object object = Napi::Object::New(info.Env());
    Put(object, "fileBytes", static_cast<double>(totals.file_bytes));
    Put(object, "dataBytes", static_cast<double>(totals.data_bytes));
    Put(object, "supersededBytes", static_cast<double>(totals.superseded_bytes));
    Put(object, "zeroedBytes", static_cast<double>(totals.zeroed_bytes));
    Put(object, "segments", static_cast<double>(totals.segments));
    object.Set("digest", Napi::String::New(info.Env(), totals.digest));
    return object;
  }

  std::shared_ptr<LayerSink> sink_;
};

}  // namespace

void RegisterLayerSink(Napi::Env env, Napi::Object exports) { SinkBinding::Register(env, exports); }

}  // namespace varve
