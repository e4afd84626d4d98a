# The guest: 32-bit protected mode, flat segments, no paging, no stack. Its bytes are in
# guest_program.cpp; test/check-guest.sh assembles this file and compares.
# ebp holds the address of the device window; all state that must last is in the mailbox there.
        .set COUNTER, 0x00
        .set LAST_CLOCK, 0x08
        .set MAX_GAP, 0x10
        .set RESET_GAP, 0x18
        .set COMMAND, 0x1c
        .set FLAGS, 0x20
        .set COUNT, 0x24
        .set FIRST, 0x28
        .set INDEX, 0x2c
        .set WORDS, 0x30
        .set VALUE, 0x34
        .set GENERATION, 0x38
        .set GRANTED, 0x3c
        .set SPENT, 0x40
        .set READ_SUM, 0x44
        .set PAGES_TOTAL, 0x48
        .set POOL, 0x2000
        .set LIST, 0x200000
        .text
        .globl _start
_start:
        cld
turn:                                   # one turn of the main loop: tick, then at most one page
        rdtsc
        movl    %eax, %ebx              # ecx:ebx = now
        movl    %edx, %ecx
        movl    LAST_CLOCK(%ebp), %esi
        orl     LAST_CLOCK+4(%ebp), %esi
        jz      no_gap                  # no last tick: the VM was just started or restored
        subl    LAST_CLOCK(%ebp), %eax  # edx:eax = now - last
        sbbl    LAST_CLOCK+4(%ebp), %edx
        jc      no_gap
        cmpl    MAX_GAP+4(%ebp), %edx
        jb      no_gap
        ja      new_gap
        cmpl    MAX_GAP(%ebp), %eax
        jbe     no_gap
new_gap:
        movl    %eax, MAX_GAP(%ebp)
        movl    %edx, MAX_GAP+4(%ebp)
no_gap:
        cmpl    $0, RESET_GAP(%ebp)
        je      no_reset
        xorl    %eax, %eax
        movl    %eax, MAX_GAP(%ebp)
        movl    %eax, MAX_GAP+4(%ebp)
        movl    %eax, RESET_GAP(%ebp)
no_reset:
        movl    %ebx, LAST_CLOCK(%ebp)
        movl    %ecx, LAST_CLOCK+4(%ebp)
        addl    $1, COUNTER(%ebp)
        adcl    $0, COUNTER+4(%ebp)
        cmpl    $0, COMMAND(%ebp)
        je      idle
        testl   $4, FLAGS(%ebp)         # paced: wait for the VMM to grant a page
        jz      pick
        movl    GRANTED(%ebp), %eax
        cmpl    SPENT(%ebp), %eax
        je      idle
        incl    SPENT(%ebp)
pick:
        movl    INDEX(%ebp), %ebx       # ebx = guest page number
        testl   $1, FLAGS(%ebp)
        jz      from_range
        movl    LIST(%ebp,%ebx,4), %ebx
        jmp     picked
from_range:
        addl    FIRST(%ebp), %ebx
picked:
        movl    %ebx, %edi              # edi = its address
        shll    $12, %edi
        movl    COMMAND(%ebp), %edx
        cmpl    $3, %edx
        je      read
        movl    WORDS(%ebp), %ecx
        cmpl    $2, %edx
        je      fill
        imull   $0x85ebca6b, %ebx, %eax # eax = mix32((value + generation * K) ^ (page * M))
        imull   $0x9e3779b9, GENERATION(%ebp), %edx
        addl    VALUE(%ebp), %edx
        xorl    %edx, %eax
        movl    %eax, %edx
        shrl    $16, %edx
        xorl    %edx, %eax
        imull   $0x7feb352d, %eax, %eax
        movl    %eax, %edx
        shrl    $15, %edx
        xorl    %edx, %eax
        imull   $0x846ca68b, %eax, %eax
        movl    %eax, %edx
        shrl    $16, %edx
        xorl    %edx, %eax
        movl    %eax, %esi              # copy `words` words from the pool, then stamp the first two
        andl    $0xffffc, %esi
        leal    POOL(%ebp,%esi,1), %esi
        movl    %edi, %edx
        rep movsl
        movl    %eax, (%edx)
        movl    %ebx, 4(%edx)
        jmp     touched
fill:
        movl    VALUE(%ebp), %eax
        rep stosl
        jmp     touched
read:
        movl    (%edi), %eax
        addl    %eax, READ_SUM(%ebp)
touched:
        addl    $1, PAGES_TOTAL(%ebp)
        adcl    $0, PAGES_TOTAL+4(%ebp)
        movl    INDEX(%ebp), %eax
        incl    %eax
        cmpl    COUNT(%ebp), %eax
        jb      same_pass
        incl    GENERATION(%ebp)
        testl   $2, FLAGS(%ebp)         # loop?
        jnz     again
        movl    $0, INDEX(%ebp)
        movl    $0, COMMAND(%ebp)
        jmp     turn
again:
        xorl    %eax, %eax
same_pass:
        movl    %eax, INDEX(%ebp)
        jmp     turn
idle:
        hlt                             # exits to the VMM, which waits a little and grants pages
        jmp     turn
