#include "emulator/faults.h"

#include <execinfo.h>
#include <ucontext.h>

#include "emulator/machine.h"

namespace emulator {

constexpr int kInterrupt = SIGURG;  // ignored by default, so harmless if it comes late
constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, kInterrupt};
static struct sigaction previous_actions[sizeof kSignals / sizeof *kSignals];

/// Where the interrupted code stood; 0 if this machine's layout is not known here.
static uintptr_t program_counter(const void* context) {
#if defined(__x86_64__)
    return static_cast<uintptr_t>(static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
    return static_cast<uintptr_t>(static_cast<const ucontext_t*>(context)->uc_mcontext.pc);
#else
    (void)context;
    return 0;
#endif
}

/// Where the kernel stood, one past the instruction: there, or in a call that led into the emulator or the C library.
static uintptr_t kernel_address(const Module& module, const void* context) {
    const uintptr_t counter = program_counter(context);
    if (module.contains(counter)) return counter + 1;
    void* frames[64];
    const int count = backtrace(frames, 64);
    for (int i = 0; i < count; ++i)
        if (module.contains(reinterpret_cast<uintptr_t>(frames[i]))) return reinterpret_cast<uintptr_t>(frames[i]);
    return 0;
}

static void handle(int signal, siginfo_t* info, void* context) {
    Worker* worker = current_worker;
    if (signal == kInterrupt) {
        // Only kernel code can be left at any instruction: it holds no lock of this process.
        if (worker != nullptr && worker->launch().module.contains(program_counter(context))) worker->abandon();
        return;
    }
    if (worker == nullptr || !worker->on_a_fiber()) {  // not a kernel's: it is to fault again, as without us
        for (size_t i = 0; i < sizeof kSignals / sizeof *kSignals; ++i)
            if (kSignals[i] == signal) sigaction(signal, &previous_actions[i], nullptr);
        return;
    }
    worker->crash(signal, info->si_addr, kernel_address(worker->launch().module, context));
}

FaultHandlers::FaultHandlers() {
    void* frame;
    backtrace(&frame, 1);  // the first call may load a library, which a signal's handler must not
    struct sigaction action = {};
    action.sa_sigaction = handle;
    // The handler may leave by switching to another stack, so the signal must not stay blocked: SA_NODEFER.
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTART;
    for (size_t i = 0; i < sizeof kSignals / sizeof *kSignals; ++i)
        sigaction(kSignals[i], &action, &previous_actions[i]);
}

FaultHandlers::~FaultHandlers() {
    for (size_t i = 0; i < sizeof kSignals / sizeof *kSignals; ++i)
        sigaction(kSignals[i], &previous_actions[i], nullptr);
}

HandlerStack::HandlerStack() : memory_(new char[Stacks::kBytes]) {
    stack_t stack = {};
    stack.ss_sp = memory_.get();
    stack.ss_size = Stacks::kBytes;
    sigaltstack(&stack, &previous_);
}

HandlerStack::~HandlerStack() { sigaltstack(&previous_, nullptr); }

void interrupt(pthread_t thread) { pthread_kill(thread, kInterrupt); }

}  // namespace emulator
