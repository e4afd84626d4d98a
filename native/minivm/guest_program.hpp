// The 32-bit program that the KVM guest runs; source and comments in test/guest.S.
#pragma once

#include <cstddef>
#include <cstdint>

namespace minivm {

extern const std::uint8_t kGuestProgram[];
extern const std::size_t kGuestProgramBytes;

}  // namespace minivm
