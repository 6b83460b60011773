// One warp, one access: the kernels behind tests/test_emulator_counters.py.
#include <flash/launch.cuh>
#include <flash/ptx/ldmatrix.cuh>

namespace {

/// Lane i reads a Vector at byte offsets[i] of memory; a negative offset leaves the lane out.
template <class Vector>
__device__ __forceinline__ void load_global(const int* offsets, const unsigned char* memory, Vector* out) {
    const int offset = offsets[threadIdx.x];
    if (offset >= 0) {
        const Vector value = *reinterpret_cast<const Vector*>(memory + offset);
        out[threadIdx.x] = value;
    }
}

template <class Vector>
__device__ __forceinline__ void store_global(const int* offsets, const Vector* in, unsigned char* memory) {
    const int offset = offsets[threadIdx.x];
    const Vector value = in[threadIdx.x];
    if (offset >= 0) *reinterpret_cast<Vector*>(memory + offset) = value;
}

/// Shared memory holds `bytes` zeros before the loads.
__device__ __forceinline__ unsigned char* cleared_shared(int bytes) {
    unsigned char* memory = flash::dynamic_shared<unsigned char>();
    for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16)
        *reinterpret_cast<float4*>(memory + i) = make_float4(0.f, 0.f, 0.f, 0.f);
    __syncthreads();
    return memory;
}

template <class Vector>
__device__ __forceinline__ void load_shared(const int* offsets, int bytes, Vector* out) {
    const unsigned char* memory = cleared_shared(bytes);
    const int offset = offsets[threadIdx.x];
    if (offset >= 0) out[threadIdx.x] = *reinterpret_cast<const Vector*>(memory + offset);
}

template <class Vector>
__device__ __forceinline__ void store_shared(const int* offsets, const Vector* in) {
    unsigned char* memory = flash::dynamic_shared<unsigned char>();
    const int offset = offsets[threadIdx.x];
    const Vector value = in[threadIdx.x];
    if (offset >= 0) *reinterpret_cast<Vector*>(memory + offset) = value;
}

}  // namespace

__global__ void ldg_32(const int* offsets, const unsigned char* memory, float* out) {
    load_global(offsets, memory, out);
}
__global__ void ldg_64(const int* offsets, const unsigned char* memory, float2* out) {
    load_global(offsets, memory, out);
}
__global__ void ldg_128(const int* offsets, const unsigned char* memory, float4* out) {
    load_global(offsets, memory, out);
}
__global__ void stg_32(const int* offsets, const float* in, unsigned char* memory) {
    store_global(offsets, in, memory);
}
__global__ void stg_64(const int* offsets, const float2* in, unsigned char* memory) {
    store_global(offsets, in, memory);
}
__global__ void stg_128(const int* offsets, const float4* in, unsigned char* memory) {
    store_global(offsets, in, memory);
}
__global__ void lds_32(const int* offsets, int bytes, float* out) { load_shared(offsets, bytes, out); }
__global__ void lds_64(const int* offsets, int bytes, float2* out) { load_shared(offsets, bytes, out); }
__global__ void lds_128(const int* offsets, int bytes, float4* out) { load_shared(offsets, bytes, out); }
__global__ void sts_32(const int* offsets, const float* in) { store_shared(offsets, in); }
__global__ void sts_64(const int* offsets, const float2* in) { store_shared(offsets, in); }
__global__ void sts_128(const int* offsets, const float4* in) { store_shared(offsets, in); }

/// Four 8x8 matrices of 2-byte elements; lane i gives the address of row i % 8 of matrix i / 8.
__global__ void ldsm_x4(const int* offsets, int bytes, uint4* out) {
    const unsigned char* memory = cleared_shared(bytes);
    uint32_t fragment[4];
    flash::ptx::ldmatrix_x4(fragment, memory + offsets[threadIdx.x]);
    out[threadIdx.x] = make_uint4(fragment[0], fragment[1], fragment[2], fragment[3]);
}

/// Block b transposes in[b] (32, 32) to out[b] through a tile whose rows are `pitch` floats apart; 32 x 8 threads.
__global__ void transpose(const float* in, float* out, int pitch) {
    float* tile = flash::dynamic_shared<float>();
    in += blockIdx.x * 1024;
    out += blockIdx.x * 1024;
    const int x = threadIdx.x;
    for (int y = threadIdx.y; y < 32; y += blockDim.y) {
        const float value = in[y * 32 + x];
        tile[y * pitch + x] = value;
    }
    __syncthreads();
    for (int y = threadIdx.y; y < 32; y += blockDim.y) {
        const float value = tile[x * pitch + y];
        out[y * 32 + x] = value;
    }
}
