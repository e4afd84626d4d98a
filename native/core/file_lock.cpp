#include "core/file_lock.hpp"

#include <sys/file.h>

#include <cerrno>

namespace varve {

int TryLockFile(int fd, FileLock lock) noexcept {
  const int operation = lock == FileLock::kShared ? LOCK_SH : LOCK_EX;
  while (::flock(fd, operation | LOCK_NB) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

}  // namespace varve
