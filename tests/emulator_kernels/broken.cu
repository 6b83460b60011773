// Kernels with one mistake each, and beside each the same kernel mended. tests/test_emulator_findings.py launches both:
// the first must be reported, at the very line; the second must be clean.
#include <cassert>
#include <flash/launch.cuh>
#include <flash/ptx/barrier.cuh>
#include <flash/ptx/cp_async.cuh>

namespace {

using flash::dynamic_shared;

/// out[i] = in[n - 1 - i], n = blockDim.x, in several warps.
template <bool MENDED>
__device__ __forceinline__ void missing_syncthreads(const float* in, float* out) {
    float* tile = dynamic_shared<float>();
    tile[threadIdx.x] = in[threadIdx.x];
    if (MENDED) __syncthreads();
    out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

/// The same inside one warp.
template <bool MENDED>
__device__ __forceinline__ void missing_syncwarp(const float* in, float* out) {
    float* tile = dynamic_shared<float>();
    tile[threadIdx.x] = in[threadIdx.x];
    if (MENDED) __syncwarp();
    out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

/// A tile that is filled again while another warp may still read it: out[i] = sum over steps of in[step][n - 1 - i].
template <bool MENDED>
__device__ __forceinline__ void overwritten_too_early(const float* in, float* out, int steps) {
    float* tile = dynamic_shared<float>();
    float sum = 0.f;
    for (int step = 0; step < steps; ++step) {
        tile[threadIdx.x] = in[step * blockDim.x + threadIdx.x];
        __syncthreads();
        sum += tile[blockDim.x - 1 - threadIdx.x];
        if (MENDED) __syncthreads();
    }
    out[threadIdx.x] = sum;
}

/// Two threads of one warp store to one place in one instruction.
template <bool MENDED>
__device__ __forceinline__ void same_place(float* out) {
    float* tile = dynamic_shared<float>();
    tile[MENDED ? threadIdx.x : threadIdx.x / 2] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x / 2];
}

/// Every block writes the same part of out.
template <bool MENDED>
__device__ __forceinline__ void blocks_collide(float* out) {
    out[MENDED ? blockIdx.x * blockDim.x + threadIdx.x : threadIdx.x] = threadIdx.x;
}

/// Each thread copies 16 bytes asynchronously and reads its own copy.
template <bool MENDED>
__device__ __forceinline__ void missing_wait(const float4* in, float4* out) {
    float4* tile = dynamic_shared<float4>();
    flash::ptx::cp_async<16>(&tile[threadIdx.x], &in[threadIdx.x]);
    flash::ptx::cp_async_commit_group();
    if (MENDED) flash::ptx::cp_async_wait_group<0>();
    out[threadIdx.x] = tile[threadIdx.x];
}

/// Two groups in flight; waiting for the older is not enough to read the younger.
template <bool MENDED>
__device__ __forceinline__ void waited_for_too_few(const float4* in, float4* out) {
    float4* tile = dynamic_shared<float4>();
    for (int stage = 0; stage < 2; ++stage) {
        flash::ptx::cp_async<16>(&tile[stage * blockDim.x + threadIdx.x], &in[stage * blockDim.x + threadIdx.x]);
        flash::ptx::cp_async_commit_group();
    }
    flash::ptx::cp_async_wait_group<MENDED ? 0 : 1>();
    out[threadIdx.x] = tile[blockDim.x + threadIdx.x];
}

/// A thread reads what another copied: a wait without a barrier orders only the thread that waits.
template <bool MENDED>
__device__ __forceinline__ void wait_without_barrier(const float4* in, float4* out) {
    float4* tile = dynamic_shared<float4>();
    flash::ptx::cp_async<16>(&tile[threadIdx.x], &in[threadIdx.x]);
    flash::ptx::cp_async_commit_group();
    flash::ptx::cp_async_wait_group<0>();
    if (MENDED) __syncthreads();
    out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

template <bool MENDED>
__device__ __forceinline__ void global_out_of_bounds(const float* in, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (MENDED && i >= n) return;
    out[i] = in[i] + 1.f;
}

template <bool MENDED>
__device__ __forceinline__ void global_store_out_of_bounds(const float* in, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const float value = i < n ? in[i] : 0.f;
    if (!MENDED || i < n) out[i] = value;
}

/// The launch gives blockDim.x floats.
template <bool MENDED>
__device__ __forceinline__ void shared_out_of_bounds(const float* in, float* out) {
    float* tile = dynamic_shared<float>();
    tile[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    const int next = MENDED ? (threadIdx.x + 1) % blockDim.x : threadIdx.x + 1;
    out[threadIdx.x] = tile[next];
}

/// Only n of the tile's blockDim.x floats are written, all are read.
template <bool MENDED>
__device__ __forceinline__ void unwritten_shared(const float* in, float* out, int n) {
    float* tile = dynamic_shared<float>();
    if (threadIdx.x < n) tile[threadIdx.x] = in[threadIdx.x];
    if (MENDED && threadIdx.x >= n) tile[threadIdx.x] = 0.f;
    __syncthreads();
    out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

/// Odd threads wait at one barrier, even threads at another.
template <bool MENDED>
__device__ __forceinline__ void divergent_barrier(float* out) {
    if (MENDED) {
        __syncthreads();
    } else if (threadIdx.x % 2) {
        __syncthreads();  // odd
        out[threadIdx.x] = 1.f;
    } else {
        __syncthreads();  // even
        out[threadIdx.x] = 2.f;
    }
    out[threadIdx.x] = 3.f;
}

/// Lane 0 is named in the mask, but waits elsewhere.
template <bool MENDED>
__device__ __forceinline__ void deadlock(float* out) {
    if (threadIdx.x == 0) {
        __syncwarp(0x00000001u);
    } else {
        __syncwarp(MENDED ? 0xfffffffeu : 0xffffffffu);  // the others
    }
    __syncthreads();
    out[threadIdx.x] = 1.f;
}

/// Lane 0 executes the shuffle, but the mask does not name it.
template <bool MENDED>
__device__ __forceinline__ void not_in_the_mask(const float* in, float* out) {
    const float value = in[threadIdx.x];
    out[threadIdx.x] = __shfl_sync(MENDED ? 0xffffffffu : 0xfffffffeu, value, 1);
}

/// Lane 15 reads from lane 16, which is elsewhere.
template <bool MENDED>
__device__ __forceinline__ void shuffled_from_nobody(const float* in, float* out) {
    const float value = in[threadIdx.x];
    if (threadIdx.x >= 16) return;
    out[threadIdx.x] = __shfl_sync(0x0000ffffu, value, MENDED ? threadIdx.x ^ 1 : threadIdx.x + 1);
}

template <bool MENDED>
__device__ __forceinline__ void write_to_input(const float* in, float* out) {
    float* target = MENDED ? out : const_cast<float*>(in);
    target[threadIdx.x] = in[threadIdx.x] * 2.f;
}

template <bool MENDED>
__device__ __forceinline__ void misaligned_global(const float* in, float4* out) {
    const float* start = in + (MENDED ? 4 : 3);
    out[threadIdx.x] = *reinterpret_cast<const float4*>(start + threadIdx.x * 4);
}

template <bool MENDED>
__device__ __forceinline__ void misaligned_shared(const float* in, float2* out) {
    float* tile = dynamic_shared<float>();
    for (int i = threadIdx.x; i < 2 * blockDim.x + 1; i += blockDim.x) tile[i] = in[i];
    __syncthreads();
    out[threadIdx.x] = *reinterpret_cast<const float2*>(tile + threadIdx.x * 2 + (MENDED ? 0 : 1));
}

template <bool MENDED>
__device__ __forceinline__ void division_by_zero(const int* in, int* out) {
    const int divisor = in[threadIdx.x];
    out[threadIdx.x] = MENDED && divisor == 0 ? 0 : 100 / divisor;
}

/// A frame of 16 KiB at each of `depth` calls.
[[gnu::noinline]] __device__ float recurse(const float* in, int depth) {
    volatile float frame[4096];
    frame[depth % 4096] = in[0];
    return depth == 0 ? frame[0] : recurse(in, depth - 1) + frame[depth % 4096];
}

template <bool MENDED>
__device__ __forceinline__ void stack_overflow(const float* in, float* out) {
    out[threadIdx.x] = recurse(in, MENDED ? 0 : 10000);
}

template <bool MENDED>
__device__ __forceinline__ void failed_assert(float* out) {
    assert(MENDED || threadIdx.x != 3);
    out[threadIdx.x] = 1.f;
}

/// A static array that nobody writes.
template <bool MENDED>
__device__ __forceinline__ void unwritten_static(float* out) {
    __shared__ float tile[32];
    if (MENDED) tile[threadIdx.x] = 1.f;
    out[threadIdx.x] = tile[threadIdx.x];
}

/// Named barriers are for whole warps.
template <bool MENDED>
__device__ __forceinline__ void barrier_for_half_a_warp(float* out) {
    flash::ptx::bar_sync(1, MENDED ? 64 : 48);
    out[threadIdx.x] = 1.f;
}

}  // namespace

__global__ void missing_syncthreads_broken(const float* in, float* out) { missing_syncthreads<false>(in, out); }
__global__ void missing_syncthreads_mended(const float* in, float* out) { missing_syncthreads<true>(in, out); }
__global__ void missing_syncwarp_broken(const float* in, float* out) { missing_syncwarp<false>(in, out); }
__global__ void missing_syncwarp_mended(const float* in, float* out) { missing_syncwarp<true>(in, out); }
__global__ void overwritten_too_early_broken(const float* in, float* out, int steps) {
    overwritten_too_early<false>(in, out, steps);
}
__global__ void overwritten_too_early_mended(const float* in, float* out, int steps) {
    overwritten_too_early<true>(in, out, steps);
}
__global__ void same_place_broken(float* out) { same_place<false>(out); }
__global__ void same_place_mended(float* out) { same_place<true>(out); }
__global__ void blocks_collide_broken(float* out) { blocks_collide<false>(out); }
__global__ void blocks_collide_mended(float* out) { blocks_collide<true>(out); }
__global__ void missing_wait_broken(const float4* in, float4* out) { missing_wait<false>(in, out); }
__global__ void missing_wait_mended(const float4* in, float4* out) { missing_wait<true>(in, out); }
__global__ void waited_for_too_few_broken(const float4* in, float4* out) { waited_for_too_few<false>(in, out); }
__global__ void waited_for_too_few_mended(const float4* in, float4* out) { waited_for_too_few<true>(in, out); }
__global__ void wait_without_barrier_broken(const float4* in, float4* out) { wait_without_barrier<false>(in, out); }
__global__ void wait_without_barrier_mended(const float4* in, float4* out) { wait_without_barrier<true>(in, out); }
__global__ void global_out_of_bounds_broken(const float* in, float* out, int n) {
    global_out_of_bounds<false>(in, out, n);
}
__global__ void global_out_of_bounds_mended(const float* in, float* out, int n) {
    global_out_of_bounds<true>(in, out, n);
}
__global__ void global_store_out_of_bounds_broken(const float* in, float* out, int n) {
    global_store_out_of_bounds<false>(in, out, n);
}
__global__ void global_store_out_of_bounds_mended(const float* in, float* out, int n) {
    global_store_out_of_bounds<true>(in, out, n);
}
__global__ void shared_out_of_bounds_broken(const float* in, float* out) { shared_out_of_bounds<false>(in, out); }
__global__ void shared_out_of_bounds_mended(const float* in, float* out) { shared_out_of_bounds<true>(in, out); }
__global__ void unwritten_shared_broken(const float* in, float* out, int n) { unwritten_shared<false>(in, out, n); }
__global__ void unwritten_shared_mended(const float* in, float* out, int n) { unwritten_shared<true>(in, out, n); }
__global__ void divergent_barrier_broken(float* out) { divergent_barrier<false>(out); }
__global__ void divergent_barrier_mended(float* out) { divergent_barrier<true>(out); }
__global__ void deadlock_broken(float* out) { deadlock<false>(out); }
__global__ void deadlock_mended(float* out) { deadlock<true>(out); }
__global__ void not_in_the_mask_broken(const float* in, float* out) { not_in_the_mask<false>(in, out); }
__global__ void not_in_the_mask_mended(const float* in, float* out) { not_in_the_mask<true>(in, out); }
__global__ void shuffled_from_nobody_broken(const float* in, float* out) { shuffled_from_nobody<false>(in, out); }
__global__ void shuffled_from_nobody_mended(const float* in, float* out) { shuffled_from_nobody<true>(in, out); }
__global__ void write_to_input_broken(const float* in, float* out) { write_to_input<false>(in, out); }
__global__ void write_to_input_mended(const float* in, float* out) { write_to_input<true>(in, out); }
__global__ void misaligned_global_broken(const float* in, float4* out) { misaligned_global<false>(in, out); }
__global__ void misaligned_global_mended(const float* in, float4* out) { misaligned_global<true>(in, out); }
__global__ void misaligned_shared_broken(const float* in, float2* out) { misaligned_shared<false>(in, out); }
__global__ void misaligned_shared_mended(const float* in, float2* out) { misaligned_shared<true>(in, out); }
__global__ void division_by_zero_broken(const int* in, int* out) { division_by_zero<false>(in, out); }
__global__ void division_by_zero_mended(const int* in, int* out) { division_by_zero<true>(in, out); }
__global__ void stack_overflow_broken(const float* in, float* out) { stack_overflow<false>(in, out); }
__global__ void stack_overflow_mended(const float* in, float* out) { stack_overflow<true>(in, out); }
__global__ void failed_assert_broken(float* out) { failed_assert<false>(out); }
__global__ void failed_assert_mended(float* out) { failed_assert<true>(out); }
__global__ void unwritten_static_broken(float* out) { unwritten_static<false>(out); }
__global__ void unwritten_static_mended(float* out) { unwritten_static<true>(out); }
__global__ void barrier_for_half_a_warp_broken(float* out) { barrier_for_half_a_warp<false>(out); }
__global__ void barrier_for_half_a_warp_mended(float* out) { barrier_for_half_a_warp<true>(out); }

__global__ void fill(float* out) { out[blockIdx.x * blockDim.x + threadIdx.x] = 1.f; }
