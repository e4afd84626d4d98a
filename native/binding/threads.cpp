#include "core/thread_runs.hpp"

#include "binding/args.hpp"
#include "binding/register.hpp"

namespace varve {
namespace {

// (pid, tid, source 0 schedstat | 1 switches, withState 0 | 1)
Napi::Value Runs(const Napi::CallbackInfo& info) {
  Args args(info);
  const std::int32_t pid = args.Pid(0, "pid");
  const std::int32_t tid = args.Pid(1, "tid");
  const std::uint64_t source = args.WholeAtMost(2, "source", 1);
  const bool with_state = args.WholeAtMost(3, "withState", 1) == 1;
  if (!args.ok()) return info.Env().Undefined();
  const ThreadRuns runs = ReadThreadRuns(
      pid, tid, source == 0 ? RunsSource::kSchedstat : RunsSource::kSwitches, with_state);
  Napi::Object result = Napi::Object::New(info.Env());
  PutBigInt(result, "ranNs", runs.ran_ns);
  PutBigInt(result, "turns", runs.turns);
  Put(result, "asleep", runs.asleep);
  Put(result, "error", static_cast<double>(runs.error));
  return result;
}

}  // namespace

void RegisterThreads(Napi::Env env, Napi::Object exports) { Export(env, exports, "threadRuns", Runs); }

}  // namespace varve
