// Opening and reading stacks for JavaScript.
#include "core/layer_reader.hpp"

#include <cerrno>
#include <memory>

#include "binding/layer_values.hpp"
#include "binding/register.hpp"
#include "core/layer_digest.hpp"
#include "core/layer_flatten.hpp"

namespace varve {
namespace {

std::string UuidText(const UuidBytes& uuid) {
  char text[37];
  FormatUuid(uuid, false, text);
  return text;
}

Napi::Object LayerFacts(Napi::Env env, const OpenedLayer& layer, std::uint64_t entries) {
  const ParsedLayer& parsed = layer.parsed;
  const LsmtHeader& trailer = parsed.lsmt.trailer;
  Napi::Object o = Napi::Object::New(env);
  Put(o, "fileBytes", static_cast<double>(layer.file_bytes));
  PutBigInt(o, "device", layer.device);
  PutBigInt(o, "inode", layer.inode);
  Put(o, "tar", parsed.body.wrapped);
  Put(o, "bodyOffset", static_cast<double>(parsed.body.offset));
  Put(o, "bodyBytes", static_cast<double>(parsed.body.size));
  const auto codec = parsed.compressed ? parsed.zfile.header.codec : Codec::kNone;
  Put(o, "codec", static_cast<double>(codec));
  Put(o, "blockBytes", parsed.compressed ? parsed.zfile.header.block_bytes : 0.0);
  const std::uint64_t blocks = parsed.compressed ? parsed.zfile.header.index_entries : 0;
  Put(o, "blocks", static_cast<double>(blocks));
  Put(o, "verify", parsed.compressed && parsed.zfile.header.verify);
  Put(o, "zfileFlags", parsed.compressed ? static_cast<double>(parsed.zfile.header.flags) : 0.0);
  Put(o, "contentBytes", static_cast<double>(parsed.lsmt.content_bytes));
  Put(o, "gapBytes", static_cast<double>(parsed.lsmt.gap_bytes));
  Put(o, "headerFlags", static_cast<double>(parsed.lsmt.header.flags));
  Put(o, "trailerFlags", static_cast<double>(trailer.flags));
  Put(o, "indexOffset", static_cast<double>(trailer.index_offset));
  Put(o, "indexEntries", static_cast<double>(trailer.index_entries));
  Put(o, "segments", static_cast<double>(entries));
  Put(o, "virtualBytes", static_cast<double>(trailer.virtual_bytes));
  Put(o, "headerVirtualBytes", static_cast<double>(parsed.lsmt.header.virtual_bytes));
  o.Set("uuid", Napi::String::New(env, UuidText(trailer.uuid)));
  o.Set("parentUuid", Napi::String::New(env, UuidText(trailer.parent_uuid)));
  o.Set("headerUuid", Napi::String::New(env, UuidText(parsed.lsmt.header.uuid)));
  o.Set("headerParentUuid", Napi::String::New(env, UuidText(parsed.lsmt.header.parent_uuid)));
  o.Set("userTag", Napi::String::New(env, trailer.user_tag.data()));
  Put(o, "dataBytes", static_cast<double>(layer.data_bytes));
  Put(o, "zeroedBytes", static_cast<double>(layer.zeroed_bytes));
  return o;
}

struct OpenOutcome {
  LayerFault fault;
  std::unique_ptr<OpenedStack> stack;
};

Napi::Value OpenedValue(Napi::Env env, OpenOutcome& outcome) {
  Napi::Object o = Napi::Object::New(env);
  o.Set("fault", FaultValue(env, outcome.fault));
  if (!outcome.fault.ok()) return o;
  OpenedStack* stack = outcome.stack.release();
  Napi::Array layers = Napi::Array::New(env, stack->layers.size());
  for (std::uint32_t i = 0; i < stack->layers.size(); ++i) {
    layers.Set(i, LayerFacts(env, stack->layers[i], stack->layer_entries[i]));
  }
  o.Set("layers", layers);
  Put(o, "virtualBytes", static_cast<double>(stack->virtual_bytes));
  Put(o, "entries", static_cast<double>(stack->entries.size()));
  Put(o, "packBytes", static_cast<double>(PackBytes(*stack)));
  o.Set("stack", Napi::External<OpenedStack>::New(
                     env, stack, [](Napi::Env, OpenedStack* done) { delete done; }));
  return o;
}

// (paths) → promise of { fault } or { layers, virtualBytes, entries, packBytes, stack }
Napi::Value OpenPaths(const Napi::CallbackInfo& info) {
  std::vector<std::string> paths;
  if (!info[0].IsArray()) {
    Napi::TypeError::New(info.Env(), "paths must be an array").ThrowAsJavaScriptException();
    return info.Env().Undefined();
  }
  const auto list = info[0].As<Napi::Array>();
  for (std::uint32_t i = 0; i < list.Length(); ++i) {
    paths.push_back(list.Get(i).ToString().Utf8Value());
  }
  return LayerJob<OpenOutcome>::Start(
      info.Env(), {},
      [paths = std::move(paths)] {
        OpenOutcome outcome;
        outcome.stack = std::make_unique<OpenedStack>();
        outcome.fault = OpenStack(paths, *outcome.stack);
        return outcome;
      },
      OpenedValue);
}

// (stack, pack) → promise of null: fills the pack, which owns the descriptors from then on.
Napi::Value Fill(const Napi::CallbackInfo& info) {
  Args args(info);
  const LayerBytes pack = args.Bytes(1, "pack");
  if (!args.ok()) return info.Env().Undefined();
  OpenedStack* stack = info[0].As<Napi::External<OpenedStack>>().Data();
  if (pack.size() != PackBytes(*stack)) {
    args.FailRange("the pack has another size");
    return info.Env().Undefined();
  }
  return StartFaultJob(info.Env(), {info[0], info[1]}, [stack, pack] {
    FillPack(*stack, pack);
    *stack = {};
    return LayerFault{};
  });
}

Napi::Value RowsValue(Napi::Env env, const std::vector<LayerRow>& rows) {
  auto array = Napi::BigUint64Array::New(env, rows.size() * 3);
  if (array.IsEmpty()) return env.Undefined();  // the worker is being terminated
  if (!rows.empty()) std::memcpy(array.Data(), rows.data(), rows.size() * sizeof(LayerRow));
  return array;
}

class ReaderBinding final : public Napi::ObjectWrap<ReaderBinding> {
 public:
  static void Register(Napi::Env env, Napi::Object exports) {
    exports.Set("StackReader",
                DefineClass(env, "StackReader",
                            {InstanceMethod<&ReaderBinding::Read>("read"),
                             InstanceMethod<&ReaderBinding::ReadNow>("readNow"),
                             InstanceMethod<&ReaderBinding::ReadRows>("readRows"),
                             InstanceMethod<&ReaderBinding::NextRows>("nextRows"),
                             InstanceMethod<&ReaderBinding::Compare>("compare"),
                             InstanceMethod<&ReaderBinding::WriteFlat>("writeFlat"),
                             InstanceMethod<&ReaderBinding::KeepShadowing>("keepShadowing"),
                             InstanceMethod<&ReaderBinding::FileBytesRead>("fileBytesRead"),
                             InstanceMethod<&ReaderBinding::CheckBlocks>("checkBlocks"),
                             InstanceMethod<&ReaderBinding::CheckTrailer>("checkTrailer"),
                             InstanceMethod<&ReaderBinding::HashPart>("hashPart"),
                             InstanceMethod<&ReaderBinding::Close>("close"),
                             InstanceMethod<&ReaderBinding::IsClosed>("isClosed")}));
  }

  // (pack, cacheBytes)
  explicit ReaderBinding(const Napi::CallbackInfo& info) : Napi::ObjectWrap<ReaderBinding>(info) {
    Args args(info);
    const LayerBytes pack = args.Bytes(0, "pack");
    const std::uint64_t cache_bytes = args.Whole(1, "cacheBytes");
    PackView view;
    if (args.ok() && !PackView::Parse(pack, view)) args.FailRange("not a packed stack");
    if (!args.ok()) return;
    pack_ = Napi::Persistent(info[0].As<Napi::Object>());
    reader_ = std::make_shared<StackReader>(view, cache_bytes);
  }

 private:
  // Work refers to this object, so that the pack stays alive until it is done.
  Napi::Value Run(const Napi::CallbackInfo& info, std::function<LayerFault()> work) {
    return StartFaultJob(info.Env(), {info.This(), info[0], info[1]}, std::move(work));
  }

  bool RangeOk(Args& args, std::uint64_t offset, std::uint64_t length) const {
    if (args.ok() && (offset > kVirtualBytesMax || length > kVirtualBytesMax - offset)) {
      args.FailRange("the range is too far out");
    }
    return args.ok();
  }

  // (into, offset) → promise of a fault or null
  Napi::Value Read(const Napi::CallbackInfo& info) {
    Args args(info);
    const LayerBytes into = args.Bytes(0, "into");
    const std::uint64_t offset = args.Whole(1, "offset");
    if (!RangeOk(args, offset, into.size())) return info.Env().Undefined();
    return Run(info, [reader = reader_, into, offset] { return reader->Read(offset, into); });
  }

  Napi::Value ReadNow(const Napi::CallbackInfo& info) {
    Args args(info);
    const LayerBytes into = args.Bytes(0, "into");
    const std::uint64_t offset = args.Whole(1, "offset");
    if (!RangeOk(args, offset, into.size())) return info.Env().Undefined();
    return FaultValue(info.Env(), reader_->Read(offset, into));
  }

  // (slab, rows) → promise of a fault or null
  Napi::Value ReadRows(const Napi::CallbackInfo& info) {
    Args args(info);
    const LayerBytes slab = args.Bytes(0, "slab");
    const auto rows = LayerRows(args, 1, slab, kSectorBytes);
    if (!args.ok()) return info.Env().Undefined();
    return Run(info, [reader = reader_, slab, rows] { return reader->ReadRows(rows, slab); });
  }

  // (entry, sector, bytesMax, rowsMax, withZeroed) → { rows, entry, sector }
  Napi::Value NextRows(const Napi::CallbackInfo& info) {
    Args args(info);
    RowCursor cursor{args.Whole(0, "entry"), args.Whole(1, "sector")};
    const std::uint64_t bytes_max = args.Whole(2, "bytesMax");
    const std::uint64_t rows_max = args.Whole(3, "rowsMax");
    const bool with_zeroed = info[4].ToBoolean();
    const bool past_end = info[5].ToBoolean();
    if (!args.ok()) return info.Env().Undefined();
    const auto rows = reader_->NextRows(cursor, bytes_max, rows_max, with_zeroed, past_end);
    Napi::Object o = Napi::Object::New(info.Env());
    o.Set("rows", RowsValue(info.Env(), rows));
    Put(o, "entry", static_cast<double>(cursor.entry));
    Put(o, "sector", static_cast<double>(cursor.sector));
    return o;
  }

  // (slab, rows, equal, cancel or undefined, cancelIndex) → fault or null
  Napi::Value Compare(const Napi::CallbackInfo& info) {
    Args args(info);
    const ConstLayerBytes slab = args.Bytes(0, "slab");
    const auto rows = LayerRows(args, 1, slab, kPageBytes);
    const auto equal = args.Bits(2, "equal");
    const std::int32_t* cancel = info[3].IsUndefined() ? nullptr : args.CancelWord(3, "cancel");
    std::uint64_t pages = 0;
    for (const LayerRow& row : rows) pages += row.length / kPageBytes;
    if (args.ok() && equal.size() < (pages + 7) / 8) args.FailRange("equal is too short");
    if (!args.ok()) return info.Env().Undefined();
    return FaultValue(info.Env(), reader_->Compare(rows, slab, equal, cancel));
  }

  // (slab, rows, fd): reads the rows and writes them at their image offsets, zeros as holes.
  Napi::Value WriteFlat(const Napi::CallbackInfo& info) {
    Args args(info);
    const LayerBytes slab = args.Bytes(0, "slab");
    const auto rows = LayerRows(args, 1, slab, kSectorBytes);
    const int fd = args.Fd(2, "fd");
    if (!args.ok()) return info.Env().Undefined();
    return Run(info, [reader = reader_, slab, rows, fd] {
      if (auto f = reader->ReadRows(rows, slab); !f.ok()) return f;
      return WriteSparse(fd, rows, slab);
    });
  }

  // (slab, layer, offset, length): reads content of one layer, which checks its blocks.
  Napi::Value CheckBlocks(const Napi::CallbackInfo& info) {
    Args args(info);
    const LayerBytes slab = args.Bytes(0, "slab");
    const std::uint64_t layer = args.Whole(1, "layer");
    const std::uint64_t offset = args.Whole(2, "offset");
    const std::uint64_t length = args.WholeAtMost(3, "length", slab.size());
    if (args.ok() && layer >= reader_->pack().layers().size()) args.FailRange("no such layer");
    if (!args.ok()) return info.Env().Undefined();
    return Run(info, [reader = reader_, slab, layer, offset, length] {
      return reader->ReadLayer(static_cast<std::uint32_t>(layer), offset, slab.first(length));
    });
  }

  // (layer) → fault or null; two small reads.
  Napi::Value CheckTrailer(const Napi::CallbackInfo& info) {
    Args args(info);
    const std::uint64_t layer = args.Whole(0, "layer");
    if (args.ok() && layer >= reader_->pack().layers().size()) args.FailRange("no such layer");
    if (!args.ok()) return info.Env().Undefined();
    return FaultValue(info.Env(), reader_->CheckTrailer(static_cast<std::uint32_t>(layer)));
  }

  // (slab, digest, layer, offset, length): adds that part of the file to the digest.
  Napi::Value HashPart(const Napi::CallbackInfo& info) {
    Args args(info);
    const LayerBytes slab = args.Bytes(0, "slab");
    const std::uint64_t layer = args.Whole(2, "layer");
    const std::uint64_t offset = args.Whole(3, "offset");
    const std::uint64_t length = args.WholeAtMost(4, "length", slab.size());
    if (args.ok() && layer >= reader_->pack().layers().size()) args.FailRange("no such layer");
    if (!args.ok()) return info.Env().Undefined();
    LayerDigest* digest = info[1].As<Napi::External<LayerDigest>>().Data();
    return Run(info, [reader = reader_, slab, digest, layer, offset, length] {
      const auto part = slab.first(length);
      const auto f = reader->ReadFile(static_cast<std::uint32_t>(layer), offset, part);
      if (f.ok()) digest->Update(part);
      return f;
    });
  }

  // (rows) → rows
  Napi::Value KeepShadowing(const Napi::CallbackInfo& info) {
    Args args(info);
    const std::span<const Row> raw = args.Rows(0, "rows");
    if (!args.ok()) return info.Env().Undefined();
    // SAFETY: both are three 64-bit words.
    return RowsValue(info.Env(), reader_->KeepShadowing({reinterpret_cast<const LayerRow*>(
                                                             raw.data()),
                                                         raw.size()}));
  }

  Napi::Value FileBytesRead(const Napi::CallbackInfo& info) {
    return Napi::Number::New(info.Env(), static_cast<double>(reader_->file_bytes_read()));
  }

  Napi::Value Close(const Napi::CallbackInfo& info) {
    reader_->pack().Close();
    return info.Env().Undefined();
  }

  Napi::Value IsClosed(const Napi::CallbackInfo& info) {
    return Napi::Boolean::New(info.Env(), reader_->pack().closed());
  }

  Napi::ObjectReference pack_;
  std::shared_ptr<StackReader> reader_;
};

}  // namespace

void RegisterLayerReader(Napi::Env env, Napi::Object exports) {
  Export(env, exports, "openStack", OpenPaths);
  Export(env, exports, "fillPack", Fill);
  ReaderBinding::Register(env, exports);
}

}  // namespace varve
