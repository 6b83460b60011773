// Where an instrumented kernel's memory accesses arrive. GCC's -fsanitize=thread puts a call before every load and
// store that may be seen outside its function; the names are those of ThreadSanitizer's library, which is not linked.
#include <cstddef>
#include <cstdint>

#include "emulator/runtime.h"
#include "emulator/trace.h"

using emulator::current_worker;
using emulator::Worker;

static inline void access(const void* address, unsigned bytes, bool write, const void* return_address) {
    Worker* worker = current_worker;
    if (worker == nullptr) return;  // host code in the kernel's file
    worker->trace()->access({reinterpret_cast<uintptr_t>(address), bytes, write, worker->pc(return_address)});
}

/// A struct copied whole, or a memcpy: 4 bytes at a time where the alignment allows, else byte by byte, as nvcc does
/// it.
static inline void access_range(const void* address, size_t bytes, bool write, const void* return_address) {
    const unsigned step = (reinterpret_cast<uintptr_t>(address) | bytes) % 4 == 0 ? 4 : 1;
    for (size_t i = 0; i < bytes; i += step) access(static_cast<const char*>(address) + i, step, write, return_address);
}

/// An access that the source does not promise to be aligned.
static inline void access_unaligned(const void* address, unsigned bytes, bool write, const void* return_address) {
    if (reinterpret_cast<uintptr_t>(address) % bytes == 0)
        access(address, bytes, write, return_address);
    else
        access_range(address, bytes, write, return_address);
}

#define HOOK(suffix, function, bytes, write) \
    EMULATOR_API void __tsan_##suffix(void* address) { function(address, bytes, write, __builtin_return_address(0)); }
#define HOOKS(bytes)                                            \
    HOOK(read##bytes, access, bytes, false)                     \
    HOOK(write##bytes, access, bytes, true)                     \
    HOOK(unaligned_read##bytes, access_unaligned, bytes, false) \
    HOOK(unaligned_write##bytes, access_unaligned, bytes, true)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

EMULATOR_API void __tsan_read_range(void* address, size_t bytes) {
    access_range(address, bytes, false, __builtin_return_address(0));
}
EMULATOR_API void __tsan_write_range(void* address, size_t bytes) {
    access_range(address, bytes, true, __builtin_return_address(0));
}
// Atomic operations of the host code in a kernel's file: the guards of its static variables, reference counts. Kernels
// have CUDA's atomics instead.
#define HOST_ATOMIC_UPDATE(bits, type, operation)                                                  \
    EMULATOR_API type __tsan_atomic##bits##_##operation(volatile type* address, type value, int) { \
        return __atomic_##operation(address, value, __ATOMIC_SEQ_CST);                             \
    }
#define HOST_ATOMIC_EXCHANGE(bits, type, suffix)                                                                 \
    EMULATOR_API int __tsan_atomic##bits##_compare_exchange_##suffix(volatile type* address, type* expected,     \
                                                                     type value, int, int) {                     \
        return __atomic_compare_exchange_n(address, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
    }
#define HOST_ATOMICS(bits, type)                                                                \
    EMULATOR_API type __tsan_atomic##bits##_load(const volatile type* address, int) {           \
        return __atomic_load_n(address, __ATOMIC_SEQ_CST);                                      \
    }                                                                                           \
    EMULATOR_API void __tsan_atomic##bits##_store(volatile type* address, type value, int) {    \
        __atomic_store_n(address, value, __ATOMIC_SEQ_CST);                                     \
    }                                                                                           \
    EMULATOR_API type __tsan_atomic##bits##_exchange(volatile type* address, type value, int) { \
        return __atomic_exchange_n(address, value, __ATOMIC_SEQ_CST);                           \
    }                                                                                           \
    HOST_ATOMIC_UPDATE(bits, type, fetch_add)                                                   \
    HOST_ATOMIC_UPDATE(bits, type, fetch_sub)                                                   \
    HOST_ATOMIC_UPDATE(bits, type, fetch_and)                                                   \
    HOST_ATOMIC_UPDATE(bits, type, fetch_or)                                                    \
    HOST_ATOMIC_UPDATE(bits, type, fetch_xor)                                                   \
    HOST_ATOMIC_EXCHANGE(bits, type, strong)                                                    \
    HOST_ATOMIC_EXCHANGE(bits, type, weak)
HOST_ATOMICS(8, uint8_t)
HOST_ATOMICS(16, uint16_t)
HOST_ATOMICS(32, uint32_t)
HOST_ATOMICS(64, uint64_t)

EMULATOR_API void __tsan_init() {}
EMULATOR_API void __tsan_func_entry(void*) {}
EMULATOR_API void __tsan_func_exit() {}
EMULATOR_API void __tsan_vptr_update(void**, void*) {}
EMULATOR_API void __tsan_vptr_read(void**) {}
