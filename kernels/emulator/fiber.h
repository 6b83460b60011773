// Fibers: the stacks on which CUDA threads run, and the switch from one to another.
#pragma once

#include <cstddef>
#include <vector>

#if !defined(__x86_64__) && !defined(__aarch64__)
#define EMULATOR_UCONTEXT  // the portable way; defining it elsewhere is good for a test of it
#endif
#ifdef EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

namespace emulator {

/// Where a suspended fiber goes on. The hand-written switch keeps everything else on the fiber's stack.
struct Context {
#ifdef EMULATOR_UCONTEXT
    ucontext_t registers;
#else
    void* stack_pointer = nullptr;
#endif
};

/// Suspends the running fiber into `from` and resumes `to`.
void switch_context(Context& from, Context& to);

/// Makes `context` a fiber that starts in entry() on the stack that ends at `top`. entry must never return.
void start_context(Context& context, char* top, void (*entry)());

/// The stacks of a block's threads, each above a guard page that turns an overflow into a fault.
class Stacks {
  public:
    static constexpr size_t kBytes = 64 * 1024;

    Stacks() = default;
    Stacks(const Stacks&) = delete;
    ~Stacks();

    /// Makes room for `count` stacks. Existing ones may move: no fiber may be alive.
    void reserve(int count);
    char* top(int index) const;
    bool contains(const void* address) const {
        return static_cast<size_t>(static_cast<const char*>(address) - memory_) < size_;
    }
    bool in_guard_page(const void* address) const;

  private:
    char* memory_ = nullptr;
    size_t size_ = 0;
};

}  // namespace emulator
