// The guest's program, as test/guest.S assembles it (test/check-guest.sh compares the two).
#include "minivm/guest_program.hpp"

namespace minivm {

// clang-format off
const std::uint8_t kGuestProgram[] = {
    // _start:
    0xfc,                                                       // cld
    // turn:
    0x0f, 0x31,                                                 // rdtsc
    0x89, 0xc3,                                                 // mov %eax,%ebx
    0x89, 0xd1,                                                 // mov %edx,%ecx
    0x8b, 0x75, 0x08,                                           // mov 0x8(%ebp),%esi
    0x0b, 0x75, 0x0c,                                           // or 0xc(%ebp),%esi
    0x74, 0x1a,                                                 // je 29 <no_gap>
    0x2b, 0x45, 0x08,                                           // sub 0x8(%ebp),%eax
    0x1b, 0x55, 0x0c,                                           // sbb 0xc(%ebp),%edx
    0x72, 0x12,                                                 // jb 29 <no_gap>
    0x3b, 0x55, 0x14,                                           // cmp 0x14(%ebp),%edx
    0x72, 0x0d,                                                 // jb 29 <no_gap>
    0x77, 0x05,                                                 // ja 23 <new_gap>
    0x3b, 0x45, 0x10,                                           // cmp 0x10(%ebp),%eax
    0x76, 0x06,                                                 // jbe 29 <no_gap>
    // new_gap:
    0x89, 0x45, 0x10,                                           // mov %eax,0x10(%ebp)
    0x89, 0x55, 0x14,                                           // mov %edx,0x14(%ebp)
    // no_gap:
    0x83, 0x7d, 0x18, 0x00,                                     // cmpl $0x0,0x18(%ebp)
    0x74, 0x0b,                                                 // je 3a <no_reset>
    0x31, 0xc0,                                                 // xor %eax,%eax
    0x89, 0x45, 0x10,                                           // mov %eax,0x10(%ebp)
    0x89, 0x45, 0x14,                                           // mov %eax,0x14(%ebp)
    0x89, 0x45, 0x18,                                           // mov %eax,0x18(%ebp)
    // no_reset:
    0x89, 0x5d, 0x08,                                           // mov %ebx,0x8(%ebp)
    0x89, 0x4d, 0x0c,                                           // mov %ecx,0xc(%ebp)
    0x83, 0x45, 0x00, 0x01,                                     // addl $0x1,0x0(%ebp)
    0x83, 0x55, 0x04, 0x00,                                     // adcl $0x0,0x4(%ebp)
    0x83, 0x7d, 0x1c, 0x00,                                     // cmpl $0x0,0x1c(%ebp)
    0x0f, 0x84, 0xd8, 0x00, 0x00, 0x00,                         // je 12a <idle>
    0xf7, 0x45, 0x20, 0x04, 0x00, 0x00, 0x00,                   // testl $0x4,0x20(%ebp)
    0x74, 0x0f,                                                 // je 6a <pick>
    0x8b, 0x45, 0x3c,                                           // mov 0x3c(%ebp),%eax
    0x3b, 0x45, 0x40,                                           // cmp 0x40(%ebp),%eax
    0x0f, 0x84, 0xc3, 0x00, 0x00, 0x00,                         // je 12a <idle>
    0xff, 0x45, 0x40,                                           // incl 0x40(%ebp)
    // pick:
    0x8b, 0x5d, 0x2c,                                           // mov 0x2c(%ebp),%ebx
    0xf7, 0x45, 0x20, 0x01, 0x00, 0x00, 0x00,                   // testl $0x1,0x20(%ebp)
    0x74, 0x09,                                                 // je 7f <from_range>
    0x8b, 0x9c, 0x9d, 0x00, 0x00, 0x20, 0x00,                   // mov 0x200000(%ebp,%ebx,4),%ebx
    0xeb, 0x03,                                                 // jmp 82 <picked>
    // from_range:
    0x03, 0x5d, 0x28,                                           // add 0x28(%ebp),%ebx
    // picked:
    0x89, 0xdf,                                                 // mov %ebx,%edi
    0xc1, 0xe7, 0x0c,                                           // shl $0xc,%edi
    0x8b, 0x55, 0x1c,                                           // mov 0x1c(%ebp),%edx
    0x83, 0xfa, 0x03,                                           // cmp $0x3,%edx
    0x74, 0x5c,                                                 // je eb <read>
    0x8b, 0x4d, 0x30,                                           // mov 0x30(%ebp),%ecx
    0x83, 0xfa, 0x02,                                           // cmp $0x2,%edx
    0x74, 0x4d,                                                 // je e4 <fill>
    0x69, 0xc3, 0x6b, 0xca, 0xeb, 0x85,                         // imul $0x85ebca6b,%ebx,%eax
    0x69, 0x55, 0x38, 0xb9, 0x79, 0x37, 0x9e,                   // imul $0x9e3779b9,0x38(%ebp),%edx
    0x03, 0x55, 0x34,                                           // add 0x34(%ebp),%edx
    0x31, 0xd0,                                                 // xor %edx,%eax
    0x89, 0xc2,                                                 // mov %eax,%edx
    0xc1, 0xea, 0x10,                                           // shr $0x10,%edx
    0x31, 0xd0,                                                 // xor %edx,%eax
    0x69, 0xc0, 0x2d, 0x35, 0xeb, 0x7f,                         // imul $0x7feb352d,%eax,%eax
    0x89, 0xc2,                                                 // mov %eax,%edx
    0xc1, 0xea, 0x0f,                                           // shr $0xf,%edx
    0x31, 0xd0,                                                 // xor %edx,%eax
    0x69, 0xc0, 0x8b, 0xa6, 0x6c, 0x84,                         // imul $0x846ca68b,%eax,%eax
    0x89, 0xc2,                                                 // mov %eax,%edx
    0xc1, 0xea, 0x10,                                           // shr $0x10,%edx
    0x31, 0xd0,                                                 // xor %edx,%eax
    0x89, 0xc6,                                                 // mov %eax,%esi
    0x81, 0xe6, 0xfc, 0xff, 0x0f, 0x00,                         // and $0xffffc,%esi
    0x8d, 0xb4, 0x35, 0x00, 0x20, 0x00, 0x00,                   // lea 0x2000(%ebp,%esi,1),%esi
    0x89, 0xfa,                                                 // mov %edi,%edx
    0xf3, 0xa5,                                                 // rep movsl %ds:(%esi),%es:(%edi)
    0x89, 0x02,                                                 // mov %eax,(%edx)
    0x89, 0x5a, 0x04,                                           // mov %ebx,0x4(%edx)
    0xeb, 0x0c,                                                 // jmp f0 <touched>
    // fill:
    0x8b, 0x45, 0x34,                                           // mov 0x34(%ebp),%eax
    0xf3, 0xab,                                                 // rep stos %eax,%es:(%edi)
    0xeb, 0x05,                                                 // jmp f0 <touched>
    // read:
    0x8b, 0x07,                                                 // mov (%edi),%eax
    0x01, 0x45, 0x44,                                           // add %eax,0x44(%ebp)
    // touched:
    0x83, 0x45, 0x48, 0x01,                                     // addl $0x1,0x48(%ebp)
    0x83, 0x55, 0x4c, 0x00,                                     // adcl $0x0,0x4c(%ebp)
    0x8b, 0x45, 0x2c,                                           // mov 0x2c(%ebp),%eax
    0x40,                                                       // inc %eax
    0x3b, 0x45, 0x24,                                           // cmp 0x24(%ebp),%eax
    0x72, 0x21,                                                 // jb 122 <same_pass>
    0xff, 0x45, 0x38,                                           // incl 0x38(%ebp)
    0xf7, 0x45, 0x20, 0x02, 0x00, 0x00, 0x00,                   // testl $0x2,0x20(%ebp)
    0x75, 0x13,                                                 // jne 120 <again>
    0xc7, 0x45, 0x2c, 0x00, 0x00, 0x00, 0x00,                   // movl $0x0,0x2c(%ebp)
    0xc7, 0x45, 0x1c, 0x00, 0x00, 0x00, 0x00,                   // movl $0x0,0x1c(%ebp)
    0xe9, 0xe1, 0xfe, 0xff, 0xff,                               // jmp 1 <turn>
    // again:
    0x31, 0xc0,                                                 // xor %eax,%eax
    // same_pass:
    0x89, 0x45, 0x2c,                                           // mov %eax,0x2c(%ebp)
    0xe9, 0xd7, 0xfe, 0xff, 0xff,                               // jmp 1 <turn>
    // idle:
    0xf4,                                                       // hlt
    0xe9, 0xd1, 0xfe, 0xff, 0xff,                               // jmp 1 <turn>
};
// clang-format on
const std::size_t kGuestProgramBytes = sizeof kGuestProgram;

}  // namespace minivm
