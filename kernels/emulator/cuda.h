// CUDA for g++: a kernel file that includes this instead of cuda_runtime.h runs on the emulator.
#pragma once

#include <math.h>

#include <climits>
#include <cstdio>
#include <cstring>
#include <memory>
#include <type_traits>

#include "emulator/half.h"
#include "emulator/runtime.h"
#include "emulator/vector_types.h"

// ---- declaration specifiers

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __grid_constant__
// A block runs on one OS thread, so a thread-local array is an array for every block. The emulator finds it, poisons it
// and checks its range as the module's thread-local segment: a kernel file must not have any other thread_local.
// `used`: GCC shall not reason that nobody writes it, or that nobody reads it.
#define __shared__ __attribute__((used)) thread_local

// ---- coordinates

#define threadIdx (::emulator::thread_index())
#define blockIdx (::emulator::block_index())
#define blockDim (::emulator::block_size())
#define gridDim (::emulator::grid_size())
constexpr int warpSize = 32;

namespace emulator {

__forceinline__ uint3 thread_index() {
    return {emulator_thread_index(0), emulator_thread_index(1), emulator_thread_index(2)};
}
__forceinline__ uint3 block_index() {
    return {emulator_block_index(0), emulator_block_index(1), emulator_block_index(2)};
}
__forceinline__ uint3 block_size() { return {emulator_block_size(0), emulator_block_size(1), emulator_block_size(2)}; }
__forceinline__ uint3 grid_size() { return {emulator_grid_size(0), emulator_grid_size(1), emulator_grid_size(2)}; }

inline void* dynamic_shared() { return emulator_dynamic_shared(); }

// A call in tail position would become a jump, and its return address the caller's: this keeps it a call.
__forceinline__ void keep_return_address() { asm volatile(""); }

/// What a fiber runs: a callable, copied from the launching thread's stack to the fiber's own, so that reading its
/// captures (the kernel's arguments) is not taken for memory traffic.
template <class F>
__attribute__((no_sanitize("thread"))) void call(void* callable) {
    alignas(F) unsigned char copy[sizeof(F)];
    __builtin_memcpy(copy, callable, sizeof(F));
    (*reinterpret_cast<F*>(copy))();
}

inline void launch(const void* kernel, void (*thread)(void*), void* argument, dim3 grid, dim3 block,
                   size_t dynamic_shared_bytes) {
    const unsigned grid_size[3] = {grid.x, grid.y, grid.z}, block_size[3] = {block.x, block.y, block.z};
#ifdef __SANITIZE_THREAD__
    constexpr bool instrumented = true;
#else
    constexpr bool instrumented = false;
#endif
    emulator_launch(kernel, thread, argument, grid_size, block_size, dynamic_shared_bytes, instrumented);
}

}  // namespace emulator

// ---- barriers and warp collectives

__forceinline__ void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    emulator_barrier(0, 0, true, file, line);
    emulator::keep_return_address();
}
__forceinline__ void __syncwarp(uint32_t mask = 0xffffffffu) {
    emulator_syncwarp(mask);
    emulator::keep_return_address();
}
__forceinline__ uint32_t __activemask() {
    uint32_t lanes = emulator_active_mask();
    emulator::keep_return_address();
    return lanes;
}
__forceinline__ void __threadfence() {
    emulator_fence();
    emulator::keep_return_address();
}
__forceinline__ void __threadfence_block() { __threadfence(); }
__forceinline__ void __trap() { __builtin_trap(); }
__forceinline__ void __nanosleep(unsigned) { __activemask(); }  // which lets other warps run

namespace emulator {

/// Calls f with value's bits in a uint64_t and returns its answer's bits as a T: 4- and 8-byte operands travel alike.
template <class T, class F>
__forceinline__ T through_bits(T value, F f) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "4- and 8-byte types");
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    Bits bits;
    __builtin_memcpy(&bits, &value, sizeof(T));
    bits = static_cast<Bits>(f(bits));
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}

template <class T>
__forceinline__ T shuffle(EmulatorShuffle kind, uint32_t mask, T value, int operand, int width) {
    return through_bits(value, [=](uint64_t bits) {
        uint64_t result = emulator_shuffle(kind, mask, bits, sizeof(T), operand, width);
        keep_return_address();
        return result;
    });
}

template <class T>
__forceinline__ T atomic(EmulatorOperation operation, T* address, T value, T expected = T()) {
    uint64_t expected_bits = 0;
    __builtin_memcpy(&expected_bits, &expected, sizeof(T));
    return through_bits(value, [=](uint64_t bits) {
        uint64_t result = emulator_atomic(operation, address, sizeof(T), bits, expected_bits);
        keep_return_address();
        return result;
    });
}

__forceinline__ uint32_t reduce(EmulatorOperation operation, uint32_t mask, uint32_t value) {
    uint32_t result = emulator_reduce(operation, mask, value);
    keep_return_address();
    return result;
}

}  // namespace emulator

template <class T>
__forceinline__ T __shfl_sync(uint32_t mask, T value, int lane, int width = 32) {
    return emulator::shuffle(EMULATOR_SHUFFLE_INDEX, mask, value, lane, width);
}
template <class T>
__forceinline__ T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32) {
    return emulator::shuffle(EMULATOR_SHUFFLE_UP, mask, value, static_cast<int>(delta), width);
}
template <class T>
__forceinline__ T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32) {
    return emulator::shuffle(EMULATOR_SHUFFLE_DOWN, mask, value, static_cast<int>(delta), width);
}
template <class T>
__forceinline__ T __shfl_xor_sync(uint32_t mask, T value, int lane_mask, int width = 32) {
    return emulator::shuffle(EMULATOR_SHUFFLE_XOR, mask, value, lane_mask, width);
}

__forceinline__ uint32_t __ballot_sync(uint32_t mask, int predicate) {
    uint32_t votes = emulator_ballot(mask, predicate != 0);
    emulator::keep_return_address();
    return votes;
}
__forceinline__ int __any_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
__forceinline__ int __all_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
template <class T>
__forceinline__ uint32_t __match_any_sync(uint32_t mask, T value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "4- and 8-byte types");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    uint32_t peers = emulator_match_any(mask, bits);
    emulator::keep_return_address();
    return peers;
}

#define EMULATOR_REDUCTION(name, type, kind)                                                  \
    __forceinline__ type __reduce_##name##_sync(uint32_t mask, type value) {                  \
        return static_cast<type>(emulator::reduce(kind, mask, static_cast<uint32_t>(value))); \
    }
EMULATOR_REDUCTION(add, unsigned, EMULATOR_ADD)
EMULATOR_REDUCTION(min, unsigned, EMULATOR_MIN_UNSIGNED)
EMULATOR_REDUCTION(max, unsigned, EMULATOR_MAX_UNSIGNED)
EMULATOR_REDUCTION(add, int, EMULATOR_ADD)
EMULATOR_REDUCTION(min, int, EMULATOR_MIN_SIGNED)
EMULATOR_REDUCTION(max, int, EMULATOR_MAX_SIGNED)
EMULATOR_REDUCTION(and, unsigned, EMULATOR_AND)
EMULATOR_REDUCTION(or, unsigned, EMULATOR_OR)
EMULATOR_REDUCTION(xor, unsigned, EMULATOR_XOR)
#undef EMULATOR_REDUCTION

// ---- atomics

#define EMULATOR_ATOMIC(name, type, kind) \
    __forceinline__ type name(type* address, type value) { return emulator::atomic(kind, address, value); }
#define EMULATOR_ATOMIC_INTEGERS(name, kind) \
    EMULATOR_ATOMIC(name, int, kind)         \
    EMULATOR_ATOMIC(name, unsigned, kind)    \
    EMULATOR_ATOMIC(name, unsigned long long, kind)
EMULATOR_ATOMIC_INTEGERS(atomicAdd, EMULATOR_ADD)
EMULATOR_ATOMIC(atomicAdd, float, EMULATOR_ADD_FLOAT)
EMULATOR_ATOMIC(atomicAdd, double, EMULATOR_ADD_FLOAT)
EMULATOR_ATOMIC_INTEGERS(atomicAnd, EMULATOR_AND)
EMULATOR_ATOMIC_INTEGERS(atomicOr, EMULATOR_OR)
EMULATOR_ATOMIC_INTEGERS(atomicXor, EMULATOR_XOR)
EMULATOR_ATOMIC_INTEGERS(atomicExch, EMULATOR_EXCHANGE)
EMULATOR_ATOMIC(atomicExch, float, EMULATOR_EXCHANGE)
EMULATOR_ATOMIC(atomicMin, int, EMULATOR_MIN_SIGNED)
EMULATOR_ATOMIC(atomicMin, long long, EMULATOR_MIN_SIGNED)
EMULATOR_ATOMIC(atomicMin, unsigned, EMULATOR_MIN_UNSIGNED)
EMULATOR_ATOMIC(atomicMin, unsigned long long, EMULATOR_MIN_UNSIGNED)
EMULATOR_ATOMIC(atomicMax, int, EMULATOR_MAX_SIGNED)
EMULATOR_ATOMIC(atomicMax, long long, EMULATOR_MAX_SIGNED)
EMULATOR_ATOMIC(atomicMax, unsigned, EMULATOR_MAX_UNSIGNED)
EMULATOR_ATOMIC(atomicMax, unsigned long long, EMULATOR_MAX_UNSIGNED)
#undef EMULATOR_ATOMIC_INTEGERS
#undef EMULATOR_ATOMIC

__forceinline__ int atomicSub(int* address, int value) { return atomicAdd(address, -value); }
__forceinline__ unsigned atomicSub(unsigned* address, unsigned value) { return atomicAdd(address, 0u - value); }
__forceinline__ int atomicCAS(int* address, int expected, int value) {
    return emulator::atomic(EMULATOR_COMPARE_AND_SWAP, address, value, expected);
}
__forceinline__ unsigned atomicCAS(unsigned* address, unsigned expected, unsigned value) {
    return emulator::atomic(EMULATOR_COMPARE_AND_SWAP, address, value, expected);
}
__forceinline__ unsigned long long atomicCAS(unsigned long long* address, unsigned long long expected,
                                             unsigned long long value) {
    return emulator::atomic(EMULATOR_COMPARE_AND_SWAP, address, value, expected);
}

// ---- arithmetic. What the GPU approximates is computed to full precision here.

__forceinline__ float __expf(float x) { return expf(x); }
__forceinline__ float __exp10f(float x) { return powf(10.0f, x); }
__forceinline__ float __logf(float x) { return logf(x); }
__forceinline__ float __log2f(float x) { return log2f(x); }
__forceinline__ float __log10f(float x) { return log10f(x); }
__forceinline__ float __powf(float x, float y) { return powf(x, y); }
__forceinline__ float __sinf(float x) { return sinf(x); }
__forceinline__ float __cosf(float x) { return cosf(x); }
__forceinline__ float __fdividef(float x, float y) { return x / y; }
__forceinline__ float __frcp_rn(float x) { return 1.0f / x; }
__forceinline__ float __fsqrt_rn(float x) { return sqrtf(x); }
__forceinline__ float __fadd_rn(float x, float y) { return x + y; }
__forceinline__ float __fsub_rn(float x, float y) { return x - y; }
__forceinline__ float __fmul_rn(float x, float y) { return x * y; }
__forceinline__ float __fdiv_rn(float x, float y) { return x / y; }
__forceinline__ float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
__forceinline__ float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
__forceinline__ float rsqrtf(float x) { return 1.0f / sqrtf(x); }
__forceinline__ float fdividef(float x, float y) { return x / y; }
__forceinline__ int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
__forceinline__ int __float2int_rz(float x) { return static_cast<int>(x); }
__forceinline__ float __int2float_rn(int x) { return static_cast<float>(x); }

__forceinline__ int __float_as_int(float x) { return emulator::bit_cast<int>(x); }
__forceinline__ unsigned __float_as_uint(float x) { return emulator::bit_cast<unsigned>(x); }
__forceinline__ float __int_as_float(int x) { return emulator::bit_cast<float>(x); }
__forceinline__ float __uint_as_float(unsigned x) { return emulator::bit_cast<float>(x); }

__forceinline__ int __popc(unsigned x) { return __builtin_popcount(x); }
__forceinline__ int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
__forceinline__ int __ffs(int x) { return __builtin_ffs(x); }
__forceinline__ int __mul24(int x, int y) { return x * y; }
__forceinline__ unsigned __umulhi(unsigned x, unsigned y) {
    return static_cast<unsigned>(static_cast<uint64_t>(x) * y >> 32);
}

template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

template <class T>
__forceinline__ T __ldg(const T* address) {
    return *address;
}
