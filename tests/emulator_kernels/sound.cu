// Correct kernels that a careless race detector would accuse. Each runs in one block of 128 threads and leaves 0, 1, 2,
// … in out; tests/test_emulator_findings.py asserts that nothing is reported.
#include <flash/launch.cuh>
#include <flash/ptx/cp_async.cuh>
#include <flash/ptx/mma.cuh>  // __nv_bfloat16

using flash::dynamic_shared;

/// Two warps write the two halves of every 4-byte word: different bytes, so no race.
__global__ void bf16_halves(float* out) {
    __nv_bfloat16* tile = dynamic_shared<__nv_bfloat16>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int element = 64 * (warp / 2) + 2 * lane + warp % 2;
    tile[element] = __float2bfloat16(static_cast<float>(element));
    __syncthreads();
    out[threadIdx.x] = __bfloat162float(tile[threadIdx.x]);
}

/// The two halves of a warp exchange values on their own, each ordered by a __syncwarp of its own lanes.
__global__ void partial_syncwarps(float* out) {
    float* tile = dynamic_shared<float>();
    const unsigned half = threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
    tile[threadIdx.x ^ 15] = threadIdx.x ^ 15;
    __syncwarp(half);
    out[threadIdx.x] = tile[threadIdx.x];
}

/// One barrier a step is enough where the next step writes the other half of a double buffer.
__global__ void double_buffer(float* out) {
    float* tile = dynamic_shared<float>();
    float sum = 0.f;
    for (int step = 0; step < 8; ++step) {
        float* buffer = tile + step % 2 * blockDim.x;
        buffer[threadIdx.x] = threadIdx.x;
        __syncthreads();
        sum += buffer[blockDim.x - 1 - threadIdx.x];
    }
    out[threadIdx.x] = blockDim.x - 1 - sum / 8.f;
}

/// Threads that have left the kernel no longer count at barriers, be they a whole warp or a part of one.
__global__ void early_exit(float* out) {
    float* tile = dynamic_shared<float>();
    out[threadIdx.x] = threadIdx.x;
    if (threadIdx.x >= 40) return;
    tile[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = 39.f - tile[39 - threadIdx.x];
}

/// Each thread writes and reads its own bytes only, with other widths.
__global__ void own_bytes(float* out) {
    float4* tile = dynamic_shared<float4>();
    const float x = threadIdx.x;
    tile[threadIdx.x] = make_float4(x, x, x, x);
    const float* mine = reinterpret_cast<const float*>(&tile[threadIdx.x]);
    out[threadIdx.x] = (mine[0] + mine[1] + mine[2] + mine[3]) / 4.f;
}

/// Two threads read and write the two halves of a word in global memory, each its own.
__global__ void own_halves(float* out) {
    __nv_bfloat16* halves = reinterpret_cast<__nv_bfloat16*>(out + 64);
    halves[threadIdx.x] = __float2bfloat16(static_cast<float>(threadIdx.x));
    halves[threadIdx.x] = __float2bfloat16(__bfloat162float(halves[threadIdx.x]) / 2.f);
    const float mine = 2.f * __bfloat162float(halves[threadIdx.x]);
    __syncthreads();
    out[threadIdx.x] = mine;
}

/// Every thread reads what one of them wrote, again and again: reads do not race with each other.
__global__ void many_readers(float* out) {
    float* tile = dynamic_shared<float>();
    if (threadIdx.x == 37) tile[0] = 1.f;
    __syncthreads();
    out[threadIdx.x] = threadIdx.x * tile[0] * tile[0];
}

/// Copies of one thread, waited for by it and then published by the barrier; the buffer is filled again only after it.
__global__ void pipelined_copies(float* out) {
    float4* tile = dynamic_shared<float4>();
    __shared__ float4 sums[32];
    const float4* source = reinterpret_cast<const float4*>(out);  // 32 float4, zero at first
    if (threadIdx.x < 32) sums[threadIdx.x] = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int step = 0; step < 4; ++step) {
        if (threadIdx.x < 32) flash::ptx::cp_async<16>(&tile[threadIdx.x], &source[threadIdx.x]);
        flash::ptx::cp_async_commit_group();
        flash::ptx::cp_async_wait_group<0>();
        __syncthreads();
        if (threadIdx.x >= 96) sums[threadIdx.x - 96].x += tile[127 - threadIdx.x].x + 1.f;
        __syncthreads();
    }
    out[threadIdx.x] = threadIdx.x * sums[threadIdx.x % 32].x / 4.f;
}

/// Atomics on one word by every thread are ordered among themselves.
__global__ void shared_atomics(float* out) {
    int* counter = dynamic_shared<int>();
    if (threadIdx.x == 0) *counter = 0;
    __syncthreads();
    atomicAdd(counter, 1);
    __syncthreads();
    out[threadIdx.x] = threadIdx.x * (*counter / 128.f);
}
