// Locks of open files (flock).
#pragma once

namespace varve {

enum class FileLock { kShared, kExclusive };

// Takes the lock for the opening that `fd` belongs to, without waiting: 0, EWOULDBLOCK if another
// opening has one that excludes it, or another errno where the filesystem cannot say. It ends with
// the opening's last descriptor, so with its process, however that ends.
int TryLockFile(int fd, FileLock lock) noexcept;

}  // namespace varve
