// The two things that are spelled differently under nvcc and under the emulator: dynamic shared memory and a launch.
#pragma once

#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include <emulator/cuda.h>
#endif

#include <atomic>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "flash/params.cuh"

namespace flash {

/// The block's dynamic shared memory, 1024-byte aligned; its size is `launch`'s `shared_bytes`.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
#ifdef __CUDACC__
    extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
    return reinterpret_cast<T*>(dynamic_shared_memory);
#else
    return static_cast<T*>(emulator::dynamic_shared());
#endif
}

#ifdef __CUDACC__
/// Throws std::runtime_error with CUDA's own words, and `what` was asked for, if there is an error.
inline void check_cuda(cudaError_t error, const std::string& what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // forgets it: the next launch would be told of it again
    throw std::runtime_error("CUDA: " + what + ": " + cudaGetErrorString(error));
}
#endif

/// Streaming multiprocessors of the current device. The emulator has 132, as an H200: what a kernel chooses by their
/// number is the same on every CPU.
inline int sm_count() {
#ifdef __CUDACC__
    static std::atomic<int> counts[64];  // by device; 0: not asked yet
    int device;
    check_cuda(cudaGetDevice(&device), "the current device");
    if (device < 64 && counts[device] != 0) return counts[device];
    int count;
    check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "the number of multiprocessors");
    if (device < 64) counts[device] = count;
    return count;
#else
    return 132;
#endif
}

/// kernel<<<grid, block, shared_bytes, stream>>>(args...) for any amount of shared memory that the device has.
/// Throws std::runtime_error with CUDA's own words if the launch is refused.
template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, void* stream, A... args) {
#ifdef __CUDACC__
    const auto check_launch = [=](cudaError_t error) {
        if (error == cudaSuccess) return;
        check_cuda(error, "a block of " + std::to_string(block.x * block.y * block.z) + " threads with " +
                              std::to_string(shared_bytes) + " bytes of shared memory");
    };
    if (shared_bytes > 48 * 1024)  // beyond the default limit a kernel has to opt in
        check_launch(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
    kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(P(args)...);
    check_launch(cudaGetLastError());
#else
    (void)stream;  // the emulator is done when launch returns
    auto thread = [=] { kernel(P(args)...); };
    emulator::launch(reinterpret_cast<const void*>(kernel), emulator::call<decltype(thread)>, &thread, grid, block,
                     shared_bytes);
#endif
}

/// Calls body(std::integral_constant<int, D>{}) for the compiled head size D == head_dim.
template <class Body>
void dispatch_head_dim(int head_dim, Body body) {
    switch (head_dim) {
        case 32: return body(std::integral_constant<int, 32>{});
        case 64: return body(std::integral_constant<int, 64>{});
        case 128: return body(std::integral_constant<int, 128>{});
        default:
            throw std::runtime_error("head_dim " + std::to_string(head_dim) + " is not compiled: 32, 64 or 128 are");
    }
}

}  // namespace flash
