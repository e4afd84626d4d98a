// N-API face of one Machine. A failed call throws an Error whose message is the reason.
#include <napi.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "minivm/machine.hpp"

namespace minivm {
namespace {

constexpr double kAbiVersion = 1;
// `,{"base_host_virt_addr":` and so on, and three numbers.
constexpr std::size_t kRangeTextBytesMax = 120;

void Throw(Napi::Env env, const std::string& message) {
  Napi::Error::New(env, message).ThrowAsJavaScriptException();
}

std::vector<std::uint8_t> BytesOf(const Napi::Value& value) {
  if (!value.IsTypedArray()) return {};
  const auto array = value.As<Napi::Uint8Array>();
  return {array.Data(), array.Data() + array.ByteLength()};
}

Napi::Value ToBuffer(Napi::Env env, const std::vector<std::uint8_t>& bytes) {
  return Napi::Buffer<std::uint8_t>::Copy(env, bytes.data(), bytes.size());
}

Napi::Value ToText(Napi::Env env, const std::string& text) { return Napi::String::New(env, text); }

void Append(std::string& text, const char* key, std::uint64_t value) {
  char digits[20];
  const auto end = std::to_chars(digits, digits + sizeof digits, value);
  text += key;
  text.append(digits, end.ptr);
}

std::uint64_t Number(const Napi::Value& value) {
  return static_cast<std::uint64_t>(value.As<Napi::Number>().Int64Value());
}

std::string Text(const Napi::Object& object, const char* key) {
  return object.Get(key).As<Napi::String>().Utf8Value();
}

class Vm final : public Napi::ObjectWrap<Vm> {
 public:
  static Napi::Function Define(Napi::Env env) {
    return DefineClass(env, "Vm",
                       {InstanceMethod<&Vm::Pause>("pause"),
                        InstanceMethod<&Vm::Resume>("resume"),
                        InstanceMethod<&Vm::Program>("program"),
                        InstanceMethod<&Vm::Counters>("counters"),
                        InstanceMethod<&Vm::ResetGap>("resetGap"),
                        InstanceMethod<&Vm::DeviceWrite>("deviceWrite"),
                        InstanceMethod<&Vm::ReadBytes>("readBytes"),
                        InstanceMethod<&Vm::HashPages>("hashPages"),
                        InstanceMethod<&Vm::Remove>("remove"),
                        InstanceMethod<&Vm::SetReadable>("setReadable"),
                        InstanceMethod<&Vm::AddRegion>("addRegion"),
                        InstanceMethod<&Vm::DropRegion>("dropRegion"),
                        InstanceMethod<&Vm::Regions>("regions"),
                        InstanceMethod<&Vm::Bits>("bits"),
                        InstanceMethod<&Vm::RangesJson>("rangesJson"),
                        InstanceMethod<&Vm::BitsJson>("bitsJson"),
                        InstanceMethod<&Vm::ResetDirty>("resetDirty"),
                        InstanceMethod<&Vm::Epoch>("epoch"),
                        InstanceMethod<&Vm::WriteMemory>("writeMemory"),
                        InstanceMethod<&Vm::SaveVcpu>("saveVcpu"),
                        InstanceMethod<&Vm::SaveWindow>("saveWindow")});
  }

  explicit Vm(const Napi::CallbackInfo& info) : Napi::ObjectWrap<Vm>(info) {
    const auto given = info[0].As<Napi::Object>();
    MachineOptions options;
    const auto regions = given.Get("regions").As<Napi::BigUint64Array>();
    for (std::size_t i = 0; i + 1 < regions.ElementLength(); i += 2) {
      options.regions.push_back({regions[i], regions[i + 1]});
    }
    options.backend = Text(given, "backend") == "kvm" ? BackendKind::kKvm : BackendKind::kThread;
    options.track = given.Get("track").As<Napi::Boolean>();
    options.huge = given.Get("huge").As<Napi::Boolean>();
    const std::string backing = Text(given, "backing");
    options.backing = backing == "File"   ? Backing::kFile
                      : backing == "Uffd" ? Backing::kUffd
                                          : Backing::kAnonymous;
    options.memory_path = Text(given, "memoryPath");
    options.saved_vcpu = BytesOf(given.Get("savedVcpu"));
    options.saved_window = BytesOf(given.Get("savedWindow"));
    machine_ = std::make_unique<Machine>();
    Check(info, machine_->Create(options));
  }

 private:
  static bool Check(const Napi::CallbackInfo& info, const Failure& failure) {
    if (failure) Throw(info.Env(), *failure);
    return !failure.has_value();
  }

  Napi::Value Pause(const Napi::CallbackInfo& info) {
    machine_->Pause();
    return info.Env().Undefined();
  }
  Napi::Value Resume(const Napi::CallbackInfo& info) {
    machine_->Resume();
    return info.Env().Undefined();
  }

  // { command, list?: Float64Array, first, count, words, value, loop, pagesPerSecond }
  Napi::Value Program(const Napi::CallbackInfo& info) {
    const auto given = info[0].As<Napi::Object>();
    minivm::Program program;
    const std::string command = Text(given, "command");
    program.command = command == "random" ? kRandom
                      : command == "fill" ? kFill
                      : command == "read" ? kRead
                                          : kIdle;
    if (given.Get("list").IsTypedArray()) {
      const auto list = given.Get("list").As<Napi::Float64Array>();
      program.use_list = true;
      program.list.reserve(list.ElementLength());
      for (std::size_t i = 0; i < list.ElementLength(); ++i) {
        program.list.push_back(static_cast<std::uint64_t>(list[i]));
      }
    }
    program.first = Number(given.Get("first"));
    program.count = Number(given.Get("count"));
    program.words = static_cast<std::uint32_t>(Number(given.Get("words")));
    program.value = static_cast<std::uint32_t>(Number(given.Get("value")));
    program.loop = given.Get("loop").As<Napi::Boolean>();
    program.pages_per_second = Number(given.Get("pagesPerSecond"));
    ProgramPlaced placed;
    if (!Check(info, machine_->SetProgram(program, placed))) return info.Env().Undefined();
    auto answer = Napi::Object::New(info.Env());
    answer.Set("guestPages", static_cast<double>(placed.guest_pages));
    answer.Set("devicePages", static_cast<double>(placed.device_pages));
    return answer;
  }

  Napi::Value Counters(const Napi::CallbackInfo& info) {
    const minivm::Counters counters = machine_->ReadCounters();
    auto answer = Napi::Object::New(info.Env());
    answer.Set("counter", static_cast<double>(counters.counter));
    answer.Set("maxGapNs", static_cast<double>(counters.max_gap_ns));
    answer.Set("pagesTotal", static_cast<double>(counters.pages_total));
    answer.Set("passes", counters.passes);
    answer.Set("readSum", counters.read_sum);
    answer.Set("idle", counters.idle);
    answer.Set("crash", machine_->crash());
    return answer;
  }

  Napi::Value ResetGap(const Napi::CallbackInfo& info) {
    machine_->ResetGap();
    return info.Env().Undefined();
  }

  Napi::Value DeviceWrite(const Napi::CallbackInfo& info) {
    const auto data = info[1].As<Napi::Uint8Array>();
    Check(info, machine_->DeviceWrite(Number(info[0]), data.Data(), data.ByteLength()));
    return info.Env().Undefined();
  }

  Napi::Value ReadBytes(const Napi::CallbackInfo& info) {
    auto out = Napi::Buffer<std::uint8_t>::New(info.Env(), Number(info[1]));
    Check(info, machine_->ReadBytes(Number(info[0]), out.Data(), out.ByteLength()));
    return out;
  }

  Napi::Value HashPages(const Napi::CallbackInfo& info) {
    const std::uint64_t count = Number(info[1]);
    auto out = Napi::BigUint64Array::New(info.Env(), count);
    Check(info, machine_->HashPages(Number(info[0]), count, out.Data()));
    return out;
  }

  Napi::Value Remove(const Napi::CallbackInfo& info) {
    Check(info, machine_->Remove(Number(info[0]), Number(info[1]), info[2].As<Napi::Boolean>()));
    return info.Env().Undefined();
  }
  Napi::Value SetReadable(const Napi::CallbackInfo& info) {
    Check(info, machine_->SetReadable(Number(info[0]), info[1].As<Napi::Boolean>()));
    return info.Env().Undefined();
  }
  Napi::Value AddRegion(const Napi::CallbackInfo& info) {
    bool exact = true;
    const std::uint64_t address = info[0].As<Napi::BigInt>().Uint64Value(&exact);
    Check(info, machine_->AddRegion({address, Number(info[1])}));
    return info.Env().Undefined();
  }
  Napi::Value DropRegion(const Napi::CallbackInfo& info) {
    Check(info, machine_->DropRegion());
    return info.Env().Undefined();
  }

  // Rows of 4: guest address, host address, image offset, bytes.
  Napi::Value Regions(const Napi::CallbackInfo& info) {
    const auto& regions = machine_->memory().regions();
    auto out = Napi::BigUint64Array::New(info.Env(), regions.size() * 4);
    std::size_t at = 0;
    for (const auto& region : regions) {
      out[at++] = region->guest_address;
      // SAFETY: an address as a number, for the API's answers; never turned back into a pointer.
      out[at++] = reinterpret_cast<std::uint64_t>(region->host);
      out[at++] = region->image_offset;
      out[at++] = region->bytes;
    }
    return out;
  }

  static bool SetOf(const std::string& name, Machine::Set& set) {
    if (name == "dirty")
      set = Machine::Set::kDirty;
    else if (name == "removed")
      set = Machine::Set::kRemoved;
    else if (name == "resident")
      set = Machine::Set::kResident;
    else if (name == "empty")
      set = Machine::Set::kZeroResident;
    else if (name == "guest-log")
      set = Machine::Set::kGuestLog;
    else if (name == "vmm-log")
      set = Machine::Set::kVmmLog;
    else
      return false;
    return true;
  }

  bool CollectNamed(const Napi::CallbackInfo& info, std::vector<Bitmap>& sets) {
    Machine::Set set = Machine::Set::kDirty;
    if (!SetOf(info[0].As<Napi::String>().Utf8Value(), set)) {
      Throw(info.Env(), "no such set");
      return false;
    }
    return Check(info, machine_->Collect(set, sets));
  }

  // The words of all regions, one region after the other.
  Napi::Value Bits(const Napi::CallbackInfo& info) {
    std::vector<Bitmap> sets;
    if (!CollectNamed(info, sets)) return info.Env().Undefined();
    std::size_t words = 0;
    for (const Bitmap& bits : sets) words += bits.size();
    auto out = Napi::BigUint64Array::New(info.Env(), words);
    std::uint64_t* into = out.Data();
    for (const Bitmap& bits : sets) into = std::copy(bits.begin(), bits.end(), into);
    return out;
  }

  // JSON text, printed here because a capture waits for it while the VM is paused:
  // [{"base_host_virt_addr":…,"image_offset":…,"length":…},…]. Runs do not cross regions.
  Napi::Value RangesJson(const Napi::CallbackInfo& info) {
    std::vector<Bitmap> sets;
    if (!CollectNamed(info, sets)) return info.Env().Undefined();
    std::uint64_t runs = 0;
    for (const Bitmap& bits : sets) {
      ForEachRun(bits, bits.size() * 64, [&](std::uint64_t, std::uint64_t) {
        ++runs;
        return true;
      });
    }
    std::string text = "[";
    text.reserve(2 + runs * kRangeTextBytesMax);
    const auto& regions = machine_->memory().regions();
    for (std::size_t i = 0; i < regions.size(); ++i) {
      const Region& region = *regions[i];
      // SAFETY: an address as a number, as above.
      const auto host = reinterpret_cast<std::uint64_t>(region.host);
      ForEachRun(sets[i], region.pages, [&](std::uint64_t first, std::uint64_t count) {
        text += text.size() > 1 ? ",{" : "{";
        Append(text, "\"base_host_virt_addr\":", host + first * kPageBytes);
        Append(text, ",\"image_offset\":", region.image_offset + first * kPageBytes);
        Append(text, ",\"length\":", count * kPageBytes);
        text += '}';
        return true;
      });
    }
    text += ']';
    return ToText(info.Env(), text);
  }

  // JSON text: [word,word,…], all regions one after the other.
  Napi::Value BitsJson(const Napi::CallbackInfo& info) {
    std::vector<Bitmap> sets;
    if (!CollectNamed(info, sets)) return info.Env().Undefined();
    std::string text = "[";
    text.reserve(1U << 20);
    for (const Bitmap& bits : sets) {
      for (const std::uint64_t word : bits) Append(text, text.size() > 1 ? "," : "", word);
    }
    text += ']';
    return ToText(info.Env(), text);
  }

  Napi::Value ResetDirty(const Napi::CallbackInfo& info) {
    Check(info, machine_->ResetDirty());
    return info.Env().Undefined();
  }

  Napi::Value Epoch(const Napi::CallbackInfo& info) {
    const std::string name = info[0].As<Napi::String>().Utf8Value();
    if (name != "status") {
      Check(info, machine_->Epoch(name == "begin"    ? EpochAction::kBegin
                                  : name == "commit" ? EpochAction::kCommit
                                                     : EpochAction::kAbort));
    }
    auto answer = Napi::Object::New(info.Env());
    answer.Set("epoch", static_cast<double>(machine_->epoch_number()));
    answer.Set("open", machine_->epoch_open());
    return answer;
  }

  // (path, set name or null for everything)
  Napi::Value WriteMemory(const Napi::CallbackInfo& info) {
    const std::string path = info[0].As<Napi::String>().Utf8Value();
    std::vector<Bitmap> sets;
    const bool some = info[1].IsString();
    if (some) {
      Machine::Set set = Machine::Set::kDirty;
      if (!SetOf(info[1].As<Napi::String>().Utf8Value(), set)) return info.Env().Undefined();
      if (!Check(info, machine_->Collect(set, sets))) return info.Env().Undefined();
    }
    Check(info, machine_->memory().WriteFile(path, some ? &sets : nullptr));
    return info.Env().Undefined();
  }

  Napi::Value SaveVcpu(const Napi::CallbackInfo& info) {
    std::vector<std::uint8_t> bytes;
    if (!Check(info, machine_->SaveVcpu(bytes))) return info.Env().Undefined();
    return ToBuffer(info.Env(), bytes);
  }
  Napi::Value SaveWindow(const Napi::CallbackInfo& info) {
    std::vector<std::uint8_t> bytes;
    machine_->SaveWindow(bytes);
    return ToBuffer(info.Env(), bytes);
  }

  std::unique_ptr<Machine> machine_;
};

Napi::Value ProbeKvmNow(const Napi::CallbackInfo& info) {
  return Napi::String::New(info.Env(), ProbeKvm());
}

Napi::Object Init(Napi::Env env, Napi::Object exports) {
  exports.Set("abiVersion", kAbiVersion);
  exports.Set("Vm", Vm::Define(env));
  exports.Set("probeKvm", Napi::Function::New(env, ProbeKvmNow, "probeKvm"));
  return exports;
}

}  // namespace

NODE_API_MODULE(minivm, Init)

}  // namespace minivm
