// v01: FlashAttention-1. Scores never leave the chip.
//
// Idea        Cut Q, K and V into tiles that fit in shared memory. A softmax needs its whole row; an online one keeps a
//             running maximum m and a running sum l of each row, and corrects them when a tile brings more:
//                 m' = max(m, max(s))   l' = l exp(m - m') + sum(exp(s - m'))   O' = O exp(m - m') + exp(s - m') V
//             The loops are FlashAttention-1's: K/V tiles outside, Q tiles inside, one block for each (batch, head).
// From v00    One kernel instead of three, and the workspace shrinks from S (M x N) to m and l (2 x M).
// Bottleneck  O, m, l and Q cross global memory once for *every* K/V tile. batch * heads blocks are too few for a GPU,
//             and in each one thread does a whole row of the softmax while half of the others wait.
// Run         flash-tutorial run v01

#include "flash/launch.cuh"

namespace {

constexpr int WARP = 32;
constexpr int THREADS = 128;
constexpr int BLOCK_KV = 32;
static_assert(BLOCK_KV == WARP, "a warp computes a row of a tile of S at a time: lane <-> key");

template <int D>
struct Shared {
    static constexpr int BLOCK_Q = D <= 64 ? 64 : 32;
    static_assert(BLOCK_Q <= THREADS, "the softmax gives every row a thread of its own");

    float Q[BLOCK_Q][D];
    float K[BLOCK_KV][D];
    float V[BLOCK_KV][D];
    float S[BLOCK_Q][BLOCK_KV];  // scores, then P = exp(s - m')
    float rescale[BLOCK_Q];      // exp(m - m')
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

// "unroll 1" keeps the loads below as they are written, 4 bytes each: nvcc would fuse those of four iterations into one
// of 16 bytes. How much that is worth is for v04 to show.
template <int D>
__global__ void __launch_bounds__(THREADS, 1) attention_kernel(flash::Params params) {
    constexpr int BLOCK_Q = Shared<D>::BLOCK_Q;
    const int M = params.queries, N = params.keys;
    const int head = blockIdx.x;                                                      // of batch * heads
    const int kv_head = head / (params.heads / params.kv_heads);                      // of batch * kv_heads
    const float* Q = static_cast<const float*>(params.q) + int64_t(head) * M * D;     // (M, D)
    const float* K = static_cast<const float*>(params.k) + int64_t(kv_head) * N * D;  // (N, D)
    const float* V = static_cast<const float*>(params.v) + int64_t(kv_head) * N * D;  // (N, D)
    float* O = static_cast<float*>(params.out) + int64_t(head) * M * D;               // (M, D)
    float* m = static_cast<float*>(params.workspace) + int64_t(head) * 2 * M;         // (M), running maximum
    float* l = m + M;                                                                 // (M), running sum
    auto& [Q_smem, K_smem, V_smem, S_smem, rescale_smem] = *flash::dynamic_shared<Shared<D>>();

    for (int64_t i = threadIdx.x; i < int64_t(M) * D; i += THREADS) O[i] = 0;
    for (int query = threadIdx.x; query < M; query += THREADS) {
        m[query] = -INFINITY;
        l[query] = 0;
    }
    __syncthreads();  // O, m and l are set before other threads use them, be there a K/V tile or not

    const int kv_tiles = (N + BLOCK_KV - 1) / BLOCK_KV, q_tiles = (M + BLOCK_Q - 1) / BLOCK_Q;
    for (int kv_tile = 0; kv_tile < kv_tiles; ++kv_tile) {
        const int kv_begin = kv_tile * BLOCK_KV;
        load_tile(K_smem, K, kv_begin, N);
        load_tile(V_smem, V, kv_begin, N);

        const int first_query = params.causal ? max(kv_begin + M - N, 0) : 0;  // earlier ones see no key of this tile
        for (int q_tile = first_query / BLOCK_Q; q_tile < q_tiles; ++q_tile) {
            const int q_begin = q_tile * BLOCK_Q;
            load_tile(Q_smem, Q, q_begin, M);
            __syncthreads();  // the tiles are whole before anyone reads what others copied

            // S = scale Q K^T, -inf where the query does not see the key.
            for (int i = threadIdx.x; i < BLOCK_Q * BLOCK_KV; i += THREADS) {
                const int row = i / BLOCK_KV, key = i % BLOCK_KV;
                const int visible = params.causal ? min(q_begin + row + N - M + 1, N) : N;  // keys 0 ... visible - 1
                float dot = 0;
#pragma unroll 1
                for (int d = 0; d < D; ++d) dot += Q_smem[row][d] * K_smem[key][d];
                S_smem[row][key] = kv_begin + key < visible ? dot * params.scale : -INFINITY;
            }
            __syncthreads();  // S is whole before a thread reads along a row of it

            // Online softmax: one thread for each row.
            const int query = q_begin + threadIdx.x;
            if (threadIdx.x < BLOCK_Q && query < M) {
                float (&S_row)[BLOCK_KV] = S_smem[threadIdx.x];
                const float m_old = m[query];
                float m_new = m_old;
#pragma unroll 1
                for (int key = 0; key < BLOCK_KV; ++key) m_new = fmaxf(m_new, S_row[key]);
                // A row that has seen no key yet has m_new = -inf, and -inf - -inf is NaN: subtract 0, exp(-inf) is 0.
                const float subtract = m_new == -INFINITY ? 0 : m_new;
                float sum = 0;
#pragma unroll 1
                for (int key = 0; key < BLOCK_KV; ++key) {
                    const float p = expf(S_row[key] - subtract);  // at most exp(0): it never overflows
                    S_row[key] = p;
                    sum += p;
                }
                const float rescale = expf(m_old - subtract);
                m[query] = m_new;
                l[query] = l[query] * rescale + sum;
                rescale_smem[threadIdx.x] = rescale;
            }
            __syncthreads();  // P and rescale are whole before others read them

            // O = O rescale + P V.
            for (int i = threadIdx.x; i < BLOCK_Q * D; i += THREADS) {
                const int row = i / D, column = i % D;
                if (q_begin + row >= M) break;
                float& o = O[int64_t(q_begin + row) * D + column];
                float sum = o * rescale_smem[row];
#pragma unroll 1
                for (int key = 0; key < BLOCK_KV; ++key) sum += S_smem[row][key] * V_smem[key][column];
                o = sum;
            }
            __syncthreads();  // everyone is done with the tiles (and O, m, l) before the next ones overwrite them
        }
    }

    // O is sum(exp(s - m) V) and l is sum(exp(s - m)). A row without keys (l = 0) gives 0, not 0 / 0, and lse = -inf.
    for (int64_t i = threadIdx.x; i < int64_t(M) * D; i += THREADS) {
        const float sum = l[i / D];
        O[i] = sum == 0 ? 0 : O[i] / sum;
    }
    for (int query = threadIdx.x; query < M; query += THREADS) {
        params.lse[int64_t(head) * M + query] = m[query] + logf(l[query]);
    }
}

void launch(const flash::Params& params, void* stream) {
    flash::dispatch_head_dim(params.head_dim, [&](auto head_dim) {
        constexpr int D = head_dim;
        const int blocks = params.batch * params.heads;
        flash::launch(attention_kernel<D>, dim3(blocks), dim3(THREADS), sizeof(Shared<D>), stream, params);
    });
}

// m and l: (batch, heads, 2, M) floats.
size_t workspace_bytes(const flash::Params& params) {
    return sizeof(float) * params.batch * params.heads * 2 * params.queries;
}

}  // namespace

FLASH_REGISTER_WITH_WORKSPACE(launch, workspace_bytes)
