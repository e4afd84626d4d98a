#include "core/process.hpp"

#include "binding/args.hpp"
#include "binding/register.hpp"

namespace varve {
namespace {

Napi::Value Peer(const Napi::CallbackInfo& info) {
  Args args(info);
  const std::string path = args.Text(0, "socketPath");
  if (!args.ok()) return info.Env().Undefined();
  const Slice slice(RealSyscalls(), nullptr);
  const PeerCredentials credentials = ReadPeerCredentials(path, slice);
  Napi::Object result = Napi::Object::New(info.Env());
  Put(result, "pid", static_cast<double>(credentials.pid));
  Put(result, "uid", static_cast<double>(credentials.uid));
  Put(result, "gid", static_cast<double>(credentials.gid));
  Put(result, "error", static_cast<double>(credentials.error));
  return result;
}

Napi::Value OpenPid(const Napi::CallbackInfo& info) {
  Args args(info);
  const std::int32_t pid = args.Pid(0, "pid");
  if (!args.ok()) return info.Env().Undefined();
  int error = 0;
  UniqueFd fd = OpenPidfd(pid, error);
  Napi::Object result = Napi::Object::New(info.Env());
  Put(result, "fd", static_cast<double>(fd.Release()));
  Put(result, "error", static_cast<double>(error));
  return result;
}

Napi::Value Exited(const Napi::CallbackInfo& info) {
  Args args(info);
  const int fd = args.Fd(0, "fd");
  if (!args.ok()) return info.Env().Undefined();
  return Napi::Boolean::New(info.Env(), PidfdExited(fd));
}

Napi::Value Close(const Napi::CallbackInfo& info) {
  Args args(info);
  const int fd = args.Fd(0, "fd");
  if (args.ok()) UniqueFd closes(fd);
  return info.Env().Undefined();
}

Napi::Value Started(const Napi::CallbackInfo& info) {
  Args args(info);
  const std::int32_t pid = args.Pid(0, "pid");
  if (!args.ok()) return info.Env().Undefined();
  const StartTime start = ReadStartTime(pid);
  Napi::Object result = Napi::Object::New(info.Env());
  PutBigInt(result, "ticks", start.ticks);
  Put(result, "error", static_cast<double>(start.error));
  return result;
}

}  // namespace

void RegisterProcess(Napi::Env env, Napi::Object exports) {
  Export(env, exports, "peerCredentials", Peer);
  Export(env, exports, "pidfdOpen", OpenPid);
  Export(env, exports, "pidfdExited", Exited);
  Export(env, exports, "closeFd", Close);
  Export(env, exports, "processStartTime", Started);
}

}  // namespace varve
