// v02: FlashAttention-2. One block for each tile of queries.
//
// Idea        Swap the loops: a block takes one Q tile and walks along K and V. The tile's running state (m, l and the
//             sum that becomes O) then stays in one place from the first key to the last, and no block needs another:
//             batch * heads * M / BLOCK_Q of them can run at once.
// From v01    Q is read once and O written once, whatever the number of K/V tiles; m, l and O move from global to
//             shared memory, and the workspace is gone. The arithmetic is the same.
// Bottleneck  Shared memory: every operand of every multiply-add is fetched from it, O too is read and written there.
//             And the softmax still has one thread for each row, between two barriers that hold up the whole block.
// Run         flash-tutorial run v02

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
    float O[BLOCK_Q][D];         // sum of P V
    float m[BLOCK_Q];            // running maximum
    float l[BLOCK_Q];            // running sum of P
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
    const int q_tiles = (M + BLOCK_Q - 1) / BLOCK_Q;
    const int head = blockIdx.x / q_tiles;                        // of batch * heads
    const int kv_head = head / (params.heads / params.kv_heads);  // of batch * kv_heads
    const int q_begin = blockIdx.x % q_tiles * BLOCK_Q;
    const float* Q = static_cast<const float*>(params.q) + int64_t(head) * M * D;     // (M, D)
    const float* K = static_cast<const float*>(params.k) + int64_t(kv_head) * N * D;  // (N, D)
    const float* V = static_cast<const float*>(params.v) + int64_t(kv_head) * N * D;  // (N, D)
    float* O = static_cast<float*>(params.out) + int64_t(head) * M * D;               // (M, D)
    auto& [Q_smem, K_smem, V_smem, S_smem, O_smem, m_smem, l_smem, rescale_smem] = *flash::dynamic_shared<Shared<D>>();

    load_tile(Q_smem, Q, q_begin, M);
    for (int i = threadIdx.x; i < BLOCK_Q * D; i += THREADS) O_smem[i / D][i % D] = 0;
    if (threadIdx.x < BLOCK_Q) {
        m_smem[threadIdx.x] = -INFINITY;
        l_smem[threadIdx.x] = 0;
    }
    __syncthreads();  // Q and the state are set before other threads use them, be there a K/V tile or not

    const int last_visible = params.causal ? min(min(q_begin + BLOCK_Q, M) + N - M, N) : N;  // keys the last row sees
    const int kv_tiles = (max(last_visible, 0) + BLOCK_KV - 1) / BLOCK_KV;
    for (int kv_tile = 0; kv_tile < kv_tiles; ++kv_tile) {
        const int kv_begin = kv_tile * BLOCK_KV;
        load_tile(K_smem, K, kv_begin, N);
        load_tile(V_smem, V, kv_begin, N);
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
        if (threadIdx.x < BLOCK_Q) {
            float (&S_row)[BLOCK_KV] = S_smem[threadIdx.x];
            const float m_old = m_smem[threadIdx.x];
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
            m_smem[threadIdx.x] = m_new;
            l_smem[threadIdx.x] = l_smem[threadIdx.x] * rescale + sum;
            rescale_smem[threadIdx.x] = rescale;
        }
        __syncthreads();  // P and rescale are whole before others read them

        // O = O rescale + P V.
        for (int i = threadIdx.x; i < BLOCK_Q * D; i += THREADS) {
            const int row = i / D, column = i % D;
            float sum = O_smem[row][column] * rescale_smem[row];
#pragma unroll 1
            for (int key = 0; key < BLOCK_KV; ++key) sum += S_smem[row][key] * V_smem[key][column];
            O_smem[row][column] = sum;
        }
        __syncthreads();  // everyone is done with the tiles before the next ones overwrite them
    }

    // O is sum(exp(s - m) V) and l is sum(exp(s - m)). A row without keys (l = 0) gives 0, not 0 / 0, and lse = -inf.
    for (int i = threadIdx.x; i < BLOCK_Q * D; i += THREADS) {
        const int row = i / D, column = i % D;
        if (q_begin + row >= M) break;
        const float sum = l_smem[row];
        O[int64_t(q_begin + row) * D + column] = sum == 0 ? 0 : O_smem[row][column] / sum;
    }
    const int query = q_begin + threadIdx.x;
    if (threadIdx.x < BLOCK_Q && query < M) {
        params.lse[int64_t(head) * M + query] = m_smem[threadIdx.x] + logf(l_smem[threadIdx.x]);
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
