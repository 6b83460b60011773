// v03: rows that belong to a warp.
//
// Idea        Give every row of the tile to one warp, from its first score to its output. The row's state (m, l and O)
//             then fits in that warp's registers, its maximum and sum are five shuffles away, and the softmax needs no
//             barrier: nothing that a warp does to its rows concerns the others.
// From v02    A lane computes the scores of one key with all of its warp's rows, so that one load from K feeds as many
//             multiply-adds. m, l, O and S leave shared memory, K and V take turns in one buffer.
// Bottleneck  Lanes read the same column of neighbouring rows of K: D floats apart, all 32 are in one bank, and a load
//             takes 32 turns. And every load is 4 bytes wide, every index 64 bits.
// Run         flash-tutorial run v03

#include "flash/launch.cuh"

namespace {

constexpr int WARP = 32;
constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int BLOCK_KV = 32;
constexpr unsigned ALL_LANES = 0xffffffff;
static_assert(BLOCK_KV == WARP, "lane <-> key");

template <int D>
struct Shared {
    static constexpr int BLOCK_Q = D <= 64 ? 64 : 32;
    static constexpr int ROWS = BLOCK_Q / WARPS;  // of a warp
    static_assert(D % WARP == 0, "every lane owns D / 32 columns of O");

    float Q[BLOCK_Q][D];
    float KV[BLOCK_KV][D];       // K, then V
    float P[BLOCK_Q][BLOCK_KV];  // exp(s - m')
};
static_assert(sizeof(Shared<128>) <= 101376, "a block fits on consumer Ampere and Ada GPUs");

// Copies rows begin ... begin + ROWS - 1 of a (rows, D) matrix. Rows past its end become zeros: they meet P = 0 in P V,
// and 0 times what shared memory held before could be NaN.
template <int ROWS, int D>
__device__ void load_tile(float (&tile)[ROWS][D], const float* matrix, int begin, int rows) {
    for (int i = threadIdx.x; i < ROWS * D; i += THREADS) {
        const int row = i / D, column = i % D;
        tile[row][column] = begin + row < rows ? matrix[int64_t(begin + row) * D + column] : 0;
    }
}

// Over the lanes that share a row: the whole warp.
__device__ float row_max(float x) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, offset));
    return x;
}

__device__ float row_sum(float x) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

// "unroll 1" keeps the loads below as they are written, 4 bytes each: nvcc would fuse those of four iterations into one
// of 16 bytes. How much that is worth is for v04 to show.
template <int D>
__global__ void __launch_bounds__(THREADS) attention_kernel(flash::Params params) {
    constexpr int BLOCK_Q = Shared<D>::BLOCK_Q, ROWS = Shared<D>::ROWS;
    const int M = params.queries, N = params.keys;
    const int q_tiles = (M + BLOCK_Q - 1) / BLOCK_Q;
    const int head = blockIdx.x / q_tiles;                        // of batch * heads
    const int kv_head = head / (params.heads / params.kv_heads);  // of batch * kv_heads
    const int q_begin = blockIdx.x % q_tiles * BLOCK_Q;
    const int warp_id = threadIdx.x / WARP, lane_id = threadIdx.x % WARP;
    const int warp_row = warp_id * ROWS;                                           // the warp's first row of the tile
    const float* Q = static_cast<const float*>(params.q) + int64_t(head) * M * D;  // (M, D)
    const float* K = static_cast<const float*>(params.k) + int64_t(kv_head) * N * D;  // (N, D)
    const float* V = static_cast<const float*>(params.v) + int64_t(kv_head) * N * D;  // (N, D)
    float* O = static_cast<float*>(params.out) + int64_t(head) * M * D;               // (M, D)
    auto& [Q_smem, KV_smem, P_smem] = *flash::dynamic_shared<Shared<D>>();

    float O_rmem[ROWS][D / WARP] = {};  // (ROWS, D): column c * 32 + lane_id at [][c]; sum of P V
    float m_rmem[ROWS];                 // (ROWS), the same in every lane: running maximum
    float l_rmem[ROWS] = {};            // (ROWS), the same in every lane: running sum of P
#pragma unroll
    for (int r = 0; r < ROWS; ++r) m_rmem[r] = -INFINITY;
    load_tile(Q_smem, Q, q_begin, M);

    const int last_visible = params.causal ? min(min(q_begin + BLOCK_Q, M) + N - M, N) : N;  // keys the last row sees
    const int kv_tiles = (max(last_visible, 0) + BLOCK_KV - 1) / BLOCK_KV;
    for (int kv_tile = 0; kv_tile < kv_tiles; ++kv_tile) {
        const int kv_begin = kv_tile * BLOCK_KV;
        load_tile(KV_smem, K, kv_begin, N);
        __syncthreads();  // K (at first Q too) is whole before anyone reads what others copied

        // S = scale Q K^T, -inf where the query does not see the key.
        float S_rmem[ROWS] = {};  // (ROWS, BLOCK_KV): column lane_id
#pragma unroll 1
        for (int d = 0; d < D; ++d) {
            const float k = KV_smem[lane_id][d];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) S_rmem[r] += Q_smem[warp_row + r][d] * k;
        }
        __syncthreads();  // every warp is done with K before V overwrites it
        load_tile(KV_smem, V, kv_begin, N);
        __syncthreads();  // V is whole before anyone reads what others copied

        // Online softmax: a warp for each row, a lane for each key.
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int query = q_begin + warp_row + r;
            const int visible = params.causal ? min(query + N - M + 1, N) : N;  // keys 0 ... visible - 1
            const float s = kv_begin + lane_id < visible ? S_rmem[r] * params.scale : -INFINITY;
            const float m_new = fmaxf(m_rmem[r], row_max(s));
            // A row that has seen no key yet has m_new = -inf, and -inf - -inf is NaN: subtract 0, exp(-inf) is 0.
            const float subtract = m_new == -INFINITY ? 0 : m_new;
            const float p = expf(s - subtract);  // at most exp(0): it never overflows
            const float rescale = expf(m_rmem[r] - subtract);
            m_rmem[r] = m_new;
            l_rmem[r] = l_rmem[r] * rescale + row_sum(p);
#pragma unroll
            for (int c = 0; c < D / WARP; ++c) O_rmem[r][c] *= rescale;
            P_smem[warp_row + r][lane_id] = p;
        }
        __syncwarp();  // P is whole before other lanes read it; other warps never do

        // O += P V.
#pragma unroll 1
        for (int key = 0; key < BLOCK_KV; ++key) {
            float v[D / WARP];
#pragma unroll
            for (int c = 0; c < D / WARP; ++c) v[c] = KV_smem[key][c * WARP + lane_id];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float p = P_smem[warp_row + r][key];
#pragma unroll
                for (int c = 0; c < D / WARP; ++c) O_rmem[r][c] += p * v[c];
            }
        }
        __syncthreads();  // every warp is done with V before the next K overwrites it
    }

    // O is sum(exp(s - m) V) and l is sum(exp(s - m)). A row without keys (l = 0) gives 0, not 0 / 0, and lse = -inf.
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int query = q_begin + warp_row + r;
        if (query >= M) break;
#pragma unroll
        for (int c = 0; c < D / WARP; ++c) {
            O[int64_t(query) * D + c * WARP + lane_id] = l_rmem[r] == 0 ? 0 : O_rmem[r][c] / l_rmem[r];
        }
        if (lane_id == 0) params.lse[int64_t(head) * M + query] = m_rmem[r] + logf(l_rmem[r]);
    }
}

void launch(const flash::Params& params, void* stream) {
    flash::dispatch_head_dim(params.head_dim, [&](auto head_dim) {
        constexpr int D = head_dim;
        const int q_tiles = (params.queries + Shared<D>::BLOCK_Q - 1) / Shared<D>::BLOCK_Q;
        const int blocks = params.batch * params.heads * q_tiles;
        flash::launch(attention_kernel<D>, dim3(blocks), dim3(THREADS), sizeof(Shared<D>), stream, params);
    });
}

}  // namespace

FLASH_REGISTER(launch)
