// cp.async: copies from global to shared memory that run on while the thread computes.
#pragma once

#ifndef __CUDACC__
#include <emulator/cuda.h>
#endif

#include <cstdint>

namespace flash::ptx {

/// cp.async.{ca,cg}.shared.global [shared], [global], BYTES, source_bytes: copies BYTES = 4, 8 or 16 bytes, both
/// addresses BYTES-aligned. Only the first source_bytes come from global memory, which is not read beyond them; the
/// rest becomes zero. BYPASS_L1 (.cg, 16 bytes only) keeps the data out of L1, for tiles that the block reads from
/// there just once.
template <int BYTES, bool BYPASS_L1 = BYTES == 16>
__device__ __forceinline__ void cp_async(void* shared, const void* global, int source_bytes = BYTES) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
    static_assert(!BYPASS_L1 || BYTES == 16, "cp.async.cg copies 16 bytes");
#ifdef __CUDACC__
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    if constexpr (BYPASS_L1)
        asm volatile("cp.async.cg.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(global), "n"(BYTES),
                     "r"(source_bytes)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(global), "n"(BYTES),
                     "r"(source_bytes)
                     : "memory");
#else
    emulator_cp_async(shared, global, BYTES, static_cast<unsigned>(source_bytes), BYPASS_L1);
    emulator::keep_return_address();
#endif
}

/// cp.async.commit_group: the thread's copies since the last commit, none being allowed, become its youngest group.
__device__ __forceinline__ void cp_async_commit_group() {
#ifdef __CUDACC__
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    emulator_cp_async_commit();
#endif
}

/// cp.async.wait_group PENDING: waits until all but the PENDING youngest groups of this thread have landed. What other
/// threads copied is there only after they have waited and a barrier has been passed.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait_group() {
    static_assert(PENDING >= 0, "a number of groups");
#ifdef __CUDACC__
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#else
    emulator_cp_async_wait(PENDING);
#endif
}

/// cp.async.wait_all: waits for all of this thread's copies, committed or not.
__device__ __forceinline__ void cp_async_wait_all() {
#ifdef __CUDACC__
    asm volatile("cp.async.wait_all;" ::: "memory");
#else
    emulator_cp_async_wait(-1);
#endif
}

}  // namespace flash::ptx
