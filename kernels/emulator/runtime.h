// What compiled kernel code calls in libflash_emulator.so. cuda.h and flash/ptx/*.cuh spell CUDA in terms of these.
//
// Operands and results travel by value, in registers: a fragment that is never in memory is never mistaken for traffic.
// Every call that the report attributes to a source line takes that line from its return address.
#pragma once

#include <cstddef>
#include <cstdint>

#define EMULATOR_API extern "C" __attribute__((visibility("default")))

// Coordinates never change while a CUDA thread lives, and a thread never moves to another OS thread: `const` lets the
// compiler call once and keep the value.
EMULATOR_API unsigned emulator_thread_index(int axis) __attribute__((const));
EMULATOR_API unsigned emulator_block_index(int axis) __attribute__((const));
EMULATOR_API unsigned emulator_block_size(int axis) __attribute__((const));
EMULATOR_API unsigned emulator_grid_size(int axis) __attribute__((const));
EMULATOR_API void* emulator_dynamic_shared() __attribute__((const));

/// Runs thread(argument) once for every CUDA thread of the grid; returns when all are done. Never throws: what goes
/// wrong is in the report. kernel identifies the kernel, and with it the module whose addresses are reported.
EMULATOR_API void emulator_launch(const void* kernel, void (*thread)(void*), void* argument, const unsigned grid[3],
                                  const unsigned block[3], size_t dynamic_shared_bytes, bool instrumented);

/// With a line, __syncthreads: file:line names the barrier, because the compiler may duplicate the call. Else bar.sync
/// (wait) or bar.arrive (!wait).
EMULATOR_API void emulator_barrier(int id, unsigned threads, bool wait, const char* file, int line);
EMULATOR_API void emulator_syncwarp(uint32_t mask);
EMULATOR_API uint32_t emulator_active_mask();
/// __threadfence
EMULATOR_API void emulator_fence();

enum EmulatorShuffle { EMULATOR_SHUFFLE_INDEX, EMULATOR_SHUFFLE_UP, EMULATOR_SHUFFLE_DOWN, EMULATOR_SHUFFLE_XOR };
EMULATOR_API uint64_t emulator_shuffle(EmulatorShuffle kind, uint32_t mask, uint64_t value, unsigned bytes, int operand,
                                       int width);
EMULATOR_API uint32_t emulator_ballot(uint32_t mask, bool predicate);
EMULATOR_API uint32_t emulator_match_any(uint32_t mask, uint64_t value);

enum EmulatorOperation {
    EMULATOR_ADD,
    EMULATOR_ADD_FLOAT,
    EMULATOR_MIN_SIGNED,
    EMULATOR_MAX_SIGNED,
    EMULATOR_MIN_UNSIGNED,
    EMULATOR_MAX_UNSIGNED,
    EMULATOR_AND,
    EMULATOR_OR,
    EMULATOR_XOR,
    EMULATOR_EXCHANGE,
    EMULATOR_COMPARE_AND_SWAP
};
EMULATOR_API uint32_t emulator_reduce(EmulatorOperation operation, uint32_t mask, uint32_t value);
/// *address = operation(*address, value), atomically over 4 or 8 bytes; returns what was there.
EMULATOR_API uint64_t emulator_atomic(EmulatorOperation operation, void* address, unsigned bytes, uint64_t value,
                                      uint64_t expected);

struct EmulatorFragment {  // four 32-bit registers
    uint32_t r[4];
};
struct EmulatorAccumulator {
    float r[4];
};
/// mma.sync.m16n8k16 with fp32 accumulators; a, b hold fp16, or bf16 if `bfloat16`.
EMULATOR_API EmulatorAccumulator emulator_mma_m16n8k16(bool bfloat16, EmulatorFragment a, uint32_t b0, uint32_t b1,
                                                       EmulatorAccumulator c);
/// ldmatrix / stmatrix of 1, 2 or 4 8x8 matrices of 16-bit elements; row is this lane's row address.
EMULATOR_API EmulatorFragment emulator_ldmatrix(int matrices, bool transposed, const void* row);
EMULATOR_API void emulator_stmatrix(int matrices, bool transposed, void* row, EmulatorFragment fragment);

/// cp.async: source_bytes <= bytes come from global memory, the rest is zero. bypass_l1 says .cg.
EMULATOR_API void emulator_cp_async(void* shared, const void* global, unsigned bytes, unsigned source_bytes,
                                    bool bypass_l1);
EMULATOR_API void emulator_cp_async_commit();
/// Waits until at most `pending` of this thread's committed groups are unfinished; a negative number waits for every
/// copy.
EMULATOR_API void emulator_cp_async_wait(int pending);

// The interface to Python (ctypes) and to binding.cpp.

/// threads: how many blocks run at once, 0 = one for every core. shared_limit_bytes: the most shared memory a block may
/// have, 0 = no limit but the emulator's own. tick: called by the launching thread about ten times a second while a
/// launch runs; a nonzero answer cancels the launch. May be null.
EMULATOR_API void emulator_configure(int threads, size_t shared_limit_bytes,
                                     int (*tick)(uint64_t blocks_done, uint64_t blocks_total));
/// Declares [pointer, pointer + bytes) as a global-memory buffer. In an instrumented launch every other address outside
/// shared memory is out of bounds, and a store to a buffer that is not `writable` is a finding.
EMULATOR_API void emulator_declare_global(const void* pointer, size_t bytes, const char* name, int writable);
EMULATOR_API void emulator_forget_globals();
/// All launches since emulator_clear_report() as JSON (report.cpp writes it); valid until the next call.
EMULATOR_API const char* emulator_report();
EMULATOR_API void emulator_clear_report();
