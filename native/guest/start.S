/*
 * The bare guest's first instructions. A VMM that loads an ELF kernel enters `_start` in 64-bit mode
 * with the first GiB mapped to itself and rsi at the boot parameters. Kernel mode may be emulated, at
 * a microsecond an instruction, so it is left at once: tables that also user mode may use, segments
 * that it can run on, and there, with I/O privilege, into C.
 */
        .code64
        .section .text.start, "ax"
        .globl _start
_start:
        cli
        /* The first 4 MiB for everybody (bits: present, writable, user; large pages). C maps the rest. */
        movq    $directory_pointers + 7, page_map
        movq    $first_directory + 7, directory_pointers
        movq    $0x000087, first_directory
        movq    $0x200087, first_directory + 8
        mov     $page_map, %eax
        mov     %rax, %cr3
        lgdt    descriptor
        /* Stack segment, stack, flags with I/O privilege 3 and no interrupts, code segment, address. */
        mov     $stack_end, %esp
        pushq   $0x23
        pushq   $stack_end - 8
        pushq   $0x3002
        pushq   $0x2b
        pushq   $main
        mov     %rsi, %rdi
        iretq

        .section .data
        .balign 8
        .word   0, 0, 0
descriptor:
        .word   segments_end - segments - 1
        .quad   segments
        .balign 8
segments:
        .quad   0
        .quad   0x00af9b000000ffff      /* 0x08: kernel code, 64-bit */
        .quad   0x00cf93000000ffff      /* 0x10: kernel data */
        .quad   0
        .quad   0x00cff3000000ffff      /* 0x20 | 3: user data */
        .quad   0x00affb000000ffff      /* 0x28 | 3: user code, 64-bit */
segments_end:

        .section .bss
        .balign 4096
        .globl directory_pointers, first_directory
page_map:
        .skip   4096
directory_pointers:
        .skip   4096
first_directory:
        .skip   4096
        .skip   4096
stack_end:
        .section .note.GNU-stack, "", @progbits
