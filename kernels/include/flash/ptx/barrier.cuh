// bar: the block's sixteen barriers by number. __syncthreads() is barrier 0 with every thread.
#pragma once

#ifndef __CUDACC__
#include <emulator/cuda.h>
#endif

namespace flash::ptx {

/// bar.sync id, threads: waits until `threads` threads, whole warps, have come to barrier `id`.
__device__ __forceinline__ void bar_sync(int id, int threads) {
#ifdef __CUDACC__
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
    emulator_barrier(id, static_cast<unsigned>(threads), true, "", 0);
    emulator::keep_return_address();
#endif
}

/// bar.arrive id, threads: counts at barrier `id` as bar_sync does, but goes on at once.
__device__ __forceinline__ void bar_arrive(int id, int threads) {
#ifdef __CUDACC__
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
    emulator_barrier(id, static_cast<unsigned>(threads), false, "", 0);
    emulator::keep_return_address();
#endif
}

}  // namespace flash::ptx
