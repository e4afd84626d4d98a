#include "core/file_lock.hpp"

#include "binding/args.hpp"
#include "binding/register.hpp"

namespace varve {
namespace {

// (fd, exclusive 0 | 1) -> errno, 0 for none
Napi::Value TryLock(const Napi::CallbackInfo& info) {
  Args args(info);
  const int fd = args.Fd(0, "fd");
  const bool exclusive = args.WholeAtMost(1, "exclusive", 1) == 1;
  if (!args.ok()) return info.Env().Undefined();
  const int error = TryLockFile(fd, exclusive ? FileLock::kExclusive : FileLock::kShared);
  return Napi::Number::New(info.Env(), error);
}

}  // namespace

void RegisterFiles(Napi::Env env, Napi::Object exports) { Export(env, exports, "tryLock", TryLock); }

}  // namespace varve
