#include "emulator/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <new>

namespace emulator {

#ifdef EMULATOR_UCONTEXT

void switch_context(Context& from, Context& to) { swapcontext(&from.registers, &to.registers); }

void start_context(Context& context, char* top, void (*entry)()) {
    constexpr size_t usable = Stacks::kBytes / 2;  // `top` may lie below the stack's end, see Stacks::top
    getcontext(&context.registers);
    context.registers.uc_stack.ss_sp = top - usable;
    context.registers.uc_stack.ss_size = usable;
    context.registers.uc_link = nullptr;
    makecontext(&context.registers, entry, 0);
}

#else

// A switch saves the registers that the calling convention says a call preserves, on the stack it leaves, and restores
// them from the stack it enters. swapcontext takes twenty times as long: it also asks the kernel for the signal mask.
extern "C" void emulator_switch_stack(void** save, void* resume) __attribute__((visibility("hidden")));

void switch_context(Context& from, Context& to) { emulator_switch_stack(&from.stack_pointer, to.stack_pointer); }

#ifdef __x86_64__

asm(R"(
    .text
    .hidden emulator_switch_stack
    .globl emulator_switch_stack
    .type emulator_switch_stack, @function
emulator_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emulator_switch_stack, . - emulator_switch_stack
)");

void start_context(Context& context, char* top, void (*entry)()) {
    // From the stack pointer up: six registers, the address to return to, and the return address that entry itself
    // never uses. entry must find the stack 8 bytes off a multiple of 16, as after a call.
    void** frame = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15)) - 8;
    memset(frame, 0, 8 * sizeof(void*));
    frame[6] = reinterpret_cast<void*>(entry);
    context.stack_pointer = frame;
}

#else  // __aarch64__

asm(R"(
    .text
    .hidden emulator_switch_stack
    .globl emulator_switch_stack
    .type emulator_switch_stack, %function
emulator_switch_stack:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size emulator_switch_stack, . - emulator_switch_stack
)");

void start_context(Context& context, char* top, void (*entry)()) {
    void** frame = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15)) - 20;
    memset(frame, 0, 20 * sizeof(void*));
    frame[11] = reinterpret_cast<void*>(entry);  // x30, where `ret` goes
    context.stack_pointer = frame;
}

#endif
#endif

static size_t guard_bytes() {
    static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return page;
}

void Stacks::reserve(int count) {
    const size_t stride = kBytes + guard_bytes(), size = stride * static_cast<size_t>(count);
    if (size <= size_) return;
    if (memory_ != nullptr) munmap(memory_, size_);
    size_ = 0;
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<char*>(memory);
    size_ = size;
    for (char* guard = memory_; guard < memory_ + size; guard += stride) mprotect(guard, guard_bytes(), PROT_NONE);
}

Stacks::~Stacks() {
    if (memory_ != nullptr) munmap(memory_, size_);
}

char* Stacks::top(int index) const {
    // Stacks that start at equal page offsets would fight for the same few cache sets: stagger them.
    const size_t stagger = static_cast<size_t>(index * 13 % 61) * 64;
    return memory_ + (kBytes + guard_bytes()) * static_cast<size_t>(index + 1) - stagger;
}

bool Stacks::in_guard_page(const void* address) const {
    return contains(address) &&
           static_cast<size_t>(static_cast<const char*>(address) - memory_) % (kBytes + guard_bytes()) < guard_bytes();
}

}  // namespace emulator
