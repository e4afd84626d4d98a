#include "core/syscalls.hpp"

#include <ctime>

namespace varve {
namespace {

std::uint64_t NowNs() {
  timespec t{};
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000u +
         static_cast<std::uint64_t>(t.tv_nsec);
}

void SleepNs(std::uint64_t ns) {
  const timespec t{static_cast<time_t>(ns / 1'000'000'000u),
                   static_cast<long>(ns % 1'000'000'000u)};
  ::nanosleep(&t, nullptr);
}

constexpr Syscalls kReal{::process_vm_readv, ::preadv, ::pwritev, NowNs, SleepNs};

}  // namespace

const Syscalls& RealSyscalls() noexcept { return kReal; }

}  // namespace varve
