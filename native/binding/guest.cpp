#include "binding/args.hpp"
#include "binding/register.hpp"
#include "core/file_read.hpp"
#include "core/guest_read.hpp"

namespace varve {
namespace {

constexpr std::uint64_t kNsPerMs = 1'000'000;

Napi::Value ToObject(Napi::Env env, const ReadOutcome& outcome) {
  Napi::Object result = Napi::Object::New(env);
  Put(result, "bytesDone", static_cast<double>(outcome.bytes_done));
  Put(result, "done", outcome.done);
  Put(result, "cancelled", outcome.cancelled);
  Put(result, "error", static_cast<double>(outcome.error));
  PutBigInt(result, "address", outcome.address);
  Put(result, "syscalls", static_cast<double>(outcome.syscalls));
  Put(result, "stalledNs", static_cast<double>(outcome.stalled_ns));
  return result;
}

// (pid or fd, rows, dest, from, cancel, cancelIndex, stalledNs, enomemDeadlineMs, callBytesMax)
template <typename Source, ReadOutcome (*kRead)(Source, const ReadRequest&, const Slice&,
                                                const Syscalls&) noexcept>
Napi::Value ReadRows(const Napi::CallbackInfo& info, Source (Args::*source)(std::size_t,
                                                                            const char*),
                     const char* source_name) {
  Args args(info);
  const Source from = (args.*source)(0, source_name);
  ReadRequest request{};
  request.rows = args.Rows(1, "rows");
  request.dest = args.Bytes(2, "dest");
  request.from = args.Whole(3, "from");
  const std::int32_t* cancel = args.CancelWord(4, "cancel");
  request.stalled_ns = args.Whole(6, "stalledNs");
  request.stalled_ns_max = args.WholeAtMost(7, "enomemDeadlineMs", 86'400'000) * kNsPerMs;
  request.call_bytes_max = args.Whole(8, "callBytesMax");
  if (!args.ok()) return info.Env().Undefined();
  const std::uint64_t total = RowBytes(request.rows);
  if (total > request.dest.size()) args.FailRange("rows are longer than dest");
  if (request.from > total) args.FailRange("from is past the end of rows");
  if (request.call_bytes_max == 0) args.FailRange("callBytesMax must be at least 1");
  if (!args.ok()) return info.Env().Undefined();
  const Syscalls& sys = RealSyscalls();
  return ToObject(info.Env(), kRead(from, request, Slice(sys, cancel), sys));
}

Napi::Value ReadProcess(const Napi::CallbackInfo& info) {
  return ReadRows<pid_t, ReadGuestRows>(info, &Args::Pid, "pid");
}

Napi::Value ReadFile(const Napi::CallbackInfo& info) {
  return ReadRows<int, ReadFileRows>(info, &Args::Fd, "fd");
}

}  // namespace

void RegisterGuest(Napi::Env env, Napi::Object exports) {
  Export(env, exports, "readProcess", ReadProcess);
  Export(env, exports, "readFileRows", ReadFile);
}

}  // namespace varve
