// Each collective as a kernel of one warp (unless it says otherwise), compared with NumPy in
// tests/test_emulator_collectives.py. `mask` always names the lanes that take part; the others do nothing.
#include <flash/launch.cuh>
#include <flash/ptx/barrier.cuh>
#include <flash/ptx/cp_async.cuh>
#include <flash/ptx/ldmatrix.cuh>
#include <flash/ptx/mma.cuh>

using flash::dynamic_shared;

// ---- shuffles: kind 0 index, 1 up, 2 down, 3 xor; each lane has an operand of its own

template <class T>
__device__ void shuffle(int kind, unsigned mask, int width, const T* in, const int* operands, T* out) {
    const int lane = threadIdx.x;
    if (!(mask >> lane & 1)) return;
    const T value = in[lane];
    const int operand = operands[lane];
    T result = value;
    if (kind == 0) result = __shfl_sync(mask, value, operand, width);
    if (kind == 1) result = __shfl_up_sync(mask, value, operand, width);
    if (kind == 2) result = __shfl_down_sync(mask, value, operand, width);
    if (kind == 3) result = __shfl_xor_sync(mask, value, operand, width);
    out[lane] = result;
}

__global__ void shuffle_int(int kind, unsigned mask, int width, const int* in, const int* operands, int* out) {
    shuffle(kind, mask, width, in, operands, out);
}
__global__ void shuffle_float(int kind, unsigned mask, int width, const float* in, const int* operands, float* out) {
    shuffle(kind, mask, width, in, operands, out);
}
__global__ void shuffle_double(int kind, unsigned mask, int width, const double* in, const int* operands, double* out) {
    shuffle(kind, mask, width, in, operands, out);
}
__global__ void shuffle_long(int kind, unsigned mask, int width, const unsigned long long* in, const int* operands,
                             unsigned long long* out) {
    shuffle(kind, mask, width, in, operands, out);
}

/// The halves of a warp shuffle at the same time in different branches; each gets its own neighbour's value.
__global__ void divergent_shuffles(const int* in, int* out) {
    const int lane = threadIdx.x, value = in[lane];
    if (lane < 16) {
        out[lane] = __shfl_xor_sync(0x0000ffffu, value, 1);
    } else {
        out[lane] = __shfl_xor_sync(0xffff0000u, value, 3);
    }
}

/// The number of rounds differs from half warp to half warp.
__global__ void uneven_rounds(int* out) {
    const int lane = threadIdx.x, half = lane / 16;
    int value = lane;
    for (int round = 0; round < 1 + 4 * half; ++round)
        value += __shfl_xor_sync(half ? 0xffff0000u : 0x0000ffffu, value, 1 << round % 4);
    out[lane] = value;
}

// ---- votes and reductions

__global__ void votes(unsigned mask, const int* in, int* all, int* any, unsigned* ballot, unsigned* match) {
    const int lane = threadIdx.x;
    if (!(mask >> lane & 1)) return;
    all[lane] = __all_sync(mask, in[lane]);
    any[lane] = __any_sync(mask, in[lane]);
    ballot[lane] = __ballot_sync(mask, in[lane]);
    match[lane] = __match_any_sync(mask, in[lane]);
}

__global__ void reductions(unsigned mask, const int* in, int* signed_out, unsigned* unsigned_out) {
    const int lane = threadIdx.x;
    if (!(mask >> lane & 1)) return;
    const int value = in[lane];
    const unsigned bits = static_cast<unsigned>(value);
    signed_out[0 * 32 + lane] = __reduce_add_sync(mask, value);
    signed_out[1 * 32 + lane] = __reduce_min_sync(mask, value);
    signed_out[2 * 32 + lane] = __reduce_max_sync(mask, value);
    unsigned_out[0 * 32 + lane] = __reduce_add_sync(mask, bits);
    unsigned_out[1 * 32 + lane] = __reduce_min_sync(mask, bits);
    unsigned_out[2 * 32 + lane] = __reduce_max_sync(mask, bits);
    unsigned_out[3 * 32 + lane] = __reduce_and_sync(mask, bits);
    unsigned_out[4 * 32 + lane] = __reduce_or_sync(mask, bits);
    unsigned_out[5 * 32 + lane] = __reduce_xor_sync(mask, bits);
}

// ---- matrices: `in` holds 8x8 matrices of 2-byte elements, one after another

template <int MATRICES, bool TRANSPOSED>
__device__ void load_matrices(const uint4* in, unsigned* out) {
    uint4* tile = dynamic_shared<uint4>();  // a row of a matrix is one uint4
    const int lane = threadIdx.x;
    tile[lane] = in[lane];
    __syncwarp();
    const uint4* row = &tile[lane % (8 * MATRICES)];
    uint32_t fragment[MATRICES];
    if constexpr (MATRICES == 1) flash::ptx::ldmatrix_x1<TRANSPOSED>(fragment, row);
    if constexpr (MATRICES == 2) flash::ptx::ldmatrix_x2<TRANSPOSED>(fragment, row);
    if constexpr (MATRICES == 4) flash::ptx::ldmatrix_x4<TRANSPOSED>(fragment, row);
    for (int matrix = 0; matrix < MATRICES; ++matrix) out[matrix * 32 + lane] = fragment[matrix];
}

__global__ void ldmatrix_1(const uint4* in, unsigned* out) { load_matrices<1, false>(in, out); }
__global__ void ldmatrix_2(const uint4* in, unsigned* out) { load_matrices<2, false>(in, out); }
__global__ void ldmatrix_4(const uint4* in, unsigned* out) { load_matrices<4, false>(in, out); }
__global__ void ldmatrix_1_trans(const uint4* in, unsigned* out) { load_matrices<1, true>(in, out); }
__global__ void ldmatrix_2_trans(const uint4* in, unsigned* out) { load_matrices<2, true>(in, out); }
__global__ void ldmatrix_4_trans(const uint4* in, unsigned* out) { load_matrices<4, true>(in, out); }

template <int MATRICES, bool TRANSPOSED>
__device__ void store_matrices(const unsigned* in, uint4* out) {
    uint4* tile = dynamic_shared<uint4>();
    const int lane = threadIdx.x;
    uint4* row = &tile[lane % (8 * MATRICES)];
    uint32_t fragment[MATRICES];
    for (int matrix = 0; matrix < MATRICES; ++matrix) fragment[matrix] = in[matrix * 32 + lane];
    if constexpr (MATRICES == 1) flash::ptx::stmatrix_x1<TRANSPOSED>(row, fragment);
    if constexpr (MATRICES == 2) flash::ptx::stmatrix_x2<TRANSPOSED>(row, fragment);
    if constexpr (MATRICES == 4) flash::ptx::stmatrix_x4<TRANSPOSED>(row, fragment);
    __syncwarp();
    if (lane < 8 * MATRICES) out[lane] = tile[lane];
}

__global__ void stmatrix_1(const unsigned* in, uint4* out) { store_matrices<1, false>(in, out); }
__global__ void stmatrix_2(const unsigned* in, uint4* out) { store_matrices<2, false>(in, out); }
__global__ void stmatrix_4(const unsigned* in, uint4* out) { store_matrices<4, false>(in, out); }
__global__ void stmatrix_1_trans(const unsigned* in, uint4* out) { store_matrices<1, true>(in, out); }
__global__ void stmatrix_2_trans(const unsigned* in, uint4* out) { store_matrices<2, true>(in, out); }
__global__ void stmatrix_4_trans(const unsigned* in, uint4* out) { store_matrices<4, true>(in, out); }

/// d (16, 8) = a (16, 16) b (16, 8) + c (16, 8), all row-major; the fragments as the PTX ISA draws them for m16n8k16.
template <class Element>
__device__ void multiply(const uint16_t* a, const uint16_t* b, const float* c, float* d) {
    const int group = threadIdx.x / 4, pair = threadIdx.x % 4 * 2;
    auto packed = [](uint16_t low, uint16_t high) { return static_cast<uint32_t>(high) << 16 | low; };
    uint32_t a_fragment[4], b_fragment[2];
    float accumulator[4];
    for (int i = 0; i < 4; ++i) {
        const uint16_t* element = a + (group + i % 2 * 8) * 16 + pair + i / 2 * 8;
        a_fragment[i] = packed(element[0], element[1]);
        accumulator[i] = c[(group + i / 2 * 8) * 8 + pair + i % 2];
    }
    for (int i = 0; i < 2; ++i) {
        const uint16_t* element = b + (pair + i * 8) * 8 + group;
        b_fragment[i] = packed(element[0], element[8]);
    }
    flash::ptx::mma_m16n8k16<Element>(accumulator, a_fragment, b_fragment);
    for (int i = 0; i < 4; ++i) d[(group + i / 2 * 8) * 8 + pair + i % 2] = accumulator[i];
}

__global__ void mma_f16(const uint16_t* a, const uint16_t* b, const float* c, float* d) {
    multiply<__half>(a, b, c, d);
}
__global__ void mma_bf16(const uint16_t* a, const uint16_t* b, const float* c, float* d) {
    multiply<__nv_bfloat16>(a, b, c, d);
}

// ---- asynchronous copies

template <int BYTES>
__device__ void copy(const unsigned char* in, unsigned char* out) {
    unsigned char* tile = dynamic_shared<unsigned char>();
    const int offset = threadIdx.x * BYTES;
    flash::ptx::cp_async<BYTES>(tile + offset, in + offset);
    flash::ptx::cp_async_commit_group();
    flash::ptx::cp_async_wait_group<0>();
    for (int i = 0; i < BYTES; ++i) out[offset + i] = tile[offset + i];
}

__global__ void cp_async_4(const unsigned char* in, unsigned char* out) { copy<4>(in, out); }
__global__ void cp_async_8(const unsigned char* in, unsigned char* out) { copy<8>(in, out); }
__global__ void cp_async_16(const unsigned char* in, unsigned char* out) { copy<16>(in, out); }

/// Lane i copies sizes[i] bytes; the rest of its 16 becomes zero.
__global__ void cp_async_zero_fill(const unsigned char* in, const int* sizes, uint4* out) {
    uint4* tile = dynamic_shared<uint4>();
    flash::ptx::cp_async<16>(&tile[threadIdx.x], in + threadIdx.x * 16, sizes[threadIdx.x]);
    flash::ptx::cp_async_commit_group();
    flash::ptx::cp_async_wait_group<0>();
    out[threadIdx.x] = tile[threadIdx.x];
}

/// out[pending] (4, 32): what four tiles hold while the `pending` youngest of four groups may still be in flight.
template <int PENDING>
__device__ void peek(const float4* tiles, float4* out) {
    flash::ptx::cp_async_wait_group<PENDING>();
    for (int tile = 0; tile < 4; ++tile) out[(PENDING * 4 + tile) * 32 + threadIdx.x] = tiles[tile * 32 + threadIdx.x];
}

__global__ void cp_async_stages(const float4* in, float4* out) {
    float4* tiles = dynamic_shared<float4>();
    for (int tile = 0; tile < 4; ++tile) {
        flash::ptx::cp_async<16>(&tiles[tile * 32 + threadIdx.x], &in[tile * 32 + threadIdx.x]);
        flash::ptx::cp_async_commit_group();
    }
    peek<3>(tiles, out);
    peek<2>(tiles, out);
    peek<1>(tiles, out);
    peek<0>(tiles, out);
}

// ---- atomics: words 0 to 5 take add, min, max, and, or, xor

template <class T>
__device__ void apply(T* words, T value) {
    atomicAdd(&words[0], value);
    atomicMin(&words[1], value);
    atomicMax(&words[2], value);
    atomicAnd(&words[3], value);
    atomicOr(&words[4], value);
    atomicXor(&words[5], value);
}

/// Each block starts from `start` in shared memory and then applies its words to those of all.
template <class T>
__device__ void apply_shared(const T* in, const T* start, T* out) {
    T* words = dynamic_shared<T>();
    if (threadIdx.x < 6) words[threadIdx.x] = start[threadIdx.x];
    __syncthreads();
    apply(words, in[blockIdx.x * blockDim.x + threadIdx.x]);
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(&out[0], words[0]);
    if (threadIdx.x == 1) atomicMin(&out[1], words[1]);
    if (threadIdx.x == 2) atomicMax(&out[2], words[2]);
    if (threadIdx.x == 3) atomicAnd(&out[3], words[3]);
    if (threadIdx.x == 4) atomicOr(&out[4], words[4]);
    if (threadIdx.x == 5) atomicXor(&out[5], words[5]);
}

__global__ void atomics_global_int(const int* in, const int*, int* out) {
    apply(out, in[blockIdx.x * blockDim.x + threadIdx.x]);
}
__global__ void atomics_global_unsigned(const unsigned* in, const unsigned*, unsigned* out) {
    apply(out, in[blockIdx.x * blockDim.x + threadIdx.x]);
}
__global__ void atomics_shared_int(const int* in, const int* start, int* out) { apply_shared(in, start, out); }
__global__ void atomics_shared_unsigned(const unsigned* in, const unsigned* start, unsigned* out) {
    apply_shared(in, start, out);
}

/// Each thread draws a ticket: what a counter held before it was raised.
__global__ void atomic_tickets(float* total, int* counter, int* tickets) {
    atomicAdd(total, static_cast<float>(threadIdx.x));
    tickets[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(counter, 1);
}

/// Thread 0 of each block takes a lock, counts, and releases it.
__global__ void lock(int* lock, int* count) {
    if (threadIdx.x == 0) {
        while (atomicCAS(lock, 0, 1) != 0) {
        }
        __threadfence();
        *count += 1;
        __threadfence();
        atomicExch(lock, 0);
    }
}

// ---- barriers

/// Warp 0 fills a buffer ten times, warp 1 reads it ten times; barrier 1 says that it is full, barrier 2 that it is
/// free.
__global__ void producer_and_consumer(float* out) {
    float* buffer = dynamic_shared<float>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int round = 0; round < 10; ++round) {
        if (warp == 0) {
            buffer[lane] = 100.f * round + lane;
            flash::ptx::bar_arrive(1, 64);
            flash::ptx::bar_sync(2, 64);
        } else {
            flash::ptx::bar_sync(1, 64);
            out[round * 32 + lane] = buffer[31 - lane] + 2 * lane - 31;
            flash::ptx::bar_arrive(2, 64);
        }
    }
}

__global__ void active_mask(unsigned mask, unsigned* out) {
    if (mask >> threadIdx.x & 1) out[threadIdx.x] = __activemask();
}
