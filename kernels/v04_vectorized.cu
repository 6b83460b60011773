// v04: 16 bytes at a time, and a patch of every product in a lane's registers.
//
// Idea        Register blocking: a lane computes 4 rows x 8 keys of S and 4 rows x D / 8 columns of O, so that a number
//             loaded from shared memory feeds 4 or 8 multiply-adds. Loads and copies are 16 bytes wide, and the rows of
//             K are padded by as much, so that neighbouring rows start in different banks.
// From v03    8 lanes share a row instead of 32, and BLOCK_KV doubles to give each of them 8 keys. Indices are 32-bit
//             inside a tile, whose 64-bit base pointer is computed once. Only tiles that need the mask apply it.
// Bottleneck  The multiply-add itself: four of five instructions are one, and a CUDA core does one at a time.
// Run         flash-tutorial run v04

#include "flash/launch.cuh"
#include "flash/vector.cuh"

namespace {

using flash::add_scaled, flash::load4, flash::scaled, flash::store4;

constexpr int WARP = 32;
constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int BLOCK_Q = 64;
constexpr int BLOCK_KV = 64;
constexpr int COPY = 4;    // floats that a thread copies at a time: 16 bytes
constexpr int PAD = 4;     // floats after a row of Q, K and V: rows that a warp reads together start 4 banks apart
constexpr int UNROLL = 2;  // steps of a product's loop written out: enough to overlap, few enough registers
using Index = int;         // an offset inside a tile: half the instructions of a 64-bit one
#define INLINE __forceinline__
constexpr int LANES_Q = 4, LANES_KV = 8;           // a warp's lanes: 4 down the rows, 8 across keys or columns
constexpr int ROWS = BLOCK_Q / (WARPS * LANES_Q);  // of a lane, LANES_Q apart
constexpr int KEYS = BLOCK_KV / LANES_KV;          // of a lane, LANES_KV apart
constexpr unsigned ALL_LANES = 0xffffffff;
static_assert(LANES_Q * LANES_KV == WARP, "every lane has its patch");

template <int D>
struct Shared {
    static_assert(D % (4 * LANES_KV) == 0, "a lane owns D / 32 groups of 4 columns of O");

    float Q[BLOCK_Q][D + PAD];
    float KV[BLOCK_KV][D + PAD];     // K, then V
    float P[BLOCK_Q][BLOCK_KV + 8];  // exp(s - m'); + 8: the 4 rows x 8 keys that a warp stores at once fill 32 banks
};
static_assert(sizeof(Shared<128>) <= 101376, "a block fits on consumer Ampere and Ada GPUs");

// Copies the first ROWS rows of a (rows, D) matrix. Rows past its end become zeros: they meet P = 0 in P V, and 0 times
// what shared memory held before could be NaN.
template <int D, int ROWS>
__device__ INLINE void load_tile(float (&tile)[ROWS][D + PAD], const float* matrix, int rows) {
    static_assert(ROWS * D / COPY % THREADS == 0, "every thread copies as many groups of floats");
#pragma unroll
    for (int i = 0; i < ROWS * D / COPY; i += THREADS) {
        const Index group = i + threadIdx.x, row = group / (D / COPY), column = group % (D / COPY) * COPY;
        if constexpr (COPY == 4)
            store4(&tile[row][column], row < rows ? load4(&matrix[row * D + column]) : float4{0, 0, 0, 0});
        else
            tile[row][column] = row < rows ? matrix[row * D + column] : 0;
    }
}

// Over the lanes that share a row: the 8 that differ in bits 1, 2 and 3 of lane_id.
__device__ INLINE float row_max(float x) {
    for (int offset = LANES_KV; offset > 1; offset /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, offset));
    return x;
}

__device__ INLINE float row_sum(float x) {
    for (int offset = LANES_KV; offset > 1; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

// Three blocks an SM leave a thread 168 registers. D = 128 needs more, not to keep some of O in memory.
template <int D>
__global__ void __launch_bounds__(THREADS, D <= 64 ? 3 : 2) attention_kernel(flash::Params params) {
    const int M = params.queries, N = params.keys;
    const int q_tiles = (M + BLOCK_Q - 1) / BLOCK_Q;
    const int head = blockIdx.x / q_tiles;                        // of batch * heads
    const int kv_head = head / (params.heads / params.kv_heads);  // of batch * kv_heads
    const int q_begin = blockIdx.x % q_tiles * BLOCK_Q;
    const int warp_id = threadIdx.x / WARP, lane_id = threadIdx.x % WARP;
    // Bits 4 and 0 of lane_id choose a lane's rows, bits 3, 2 and 1 its keys and columns. Shared memory serves 8 lanes
    // of a 16-byte load at a time, but 16 if each lane's neighbour (lane ^ 1, or lane ^ 2) wants the same 16 bytes.
    // lane ^ 1 has the same keys and columns here, lane ^ 2 the same rows: every load below takes 2 turns, where
    // lane_id / 8 and lane_id % 8 would make it 4 for K and V.
    const int lane_q = lane_id / 16 * 2 + lane_id % 2, lane_kv = lane_id / 2 % LANES_KV;
    const int lane_row = warp_id * ROWS * LANES_Q + lane_q;                                    // the lane's first row
    const float* Q = static_cast<const float*>(params.q) + (int64_t(head) * M + q_begin) * D;  // (M - q_begin, D)
    const float* K = static_cast<const float*>(params.k) + int64_t(kv_head) * N * D;           // (N, D)
    const float* V = static_cast<const float*>(params.v) + int64_t(kv_head) * N * D;           // (N, D)
    float* O = static_cast<float*>(params.out) + (int64_t(head) * M + q_begin) * D;            // (M - q_begin, D)
    auto& [Q_smem, KV_smem, P_smem] = *flash::dynamic_shared<Shared<D>>();

    float4 O_rmem[ROWS][D / 32] = {};  // (ROWS, D): columns c * 32 + lane_kv * 4 + (0 ... 3) at [][c]; sum of P V
    float m_rmem[ROWS];                // (ROWS), the same in 8 lanes: running maximum
    float l_rmem[ROWS] = {};           // (ROWS), the same in 8 lanes: running sum of P
#pragma unroll
    for (int r = 0; r < ROWS; ++r) m_rmem[r] = -INFINITY;
    load_tile<D>(Q_smem, Q, M - q_begin);

    const int first_visible = params.causal ? min(q_begin + 1 + N - M, N) : N;               // keys the first row sees
    const int last_visible = params.causal ? min(min(q_begin + BLOCK_Q, M) + N - M, N) : N;  // keys the last row sees
    const int kv_tiles = (max(last_visible, 0) + BLOCK_KV - 1) / BLOCK_KV;
    for (int kv_tile = 0; kv_tile < kv_tiles; ++kv_tile) {
        const int kv_begin = kv_tile * BLOCK_KV;
        load_tile<D>(KV_smem, K + int64_t(kv_begin) * D, N - kv_begin);
        __syncthreads();  // K (at first Q too) is whole before anyone reads what others copied

        // S = scale Q K^T, -inf where the query does not see the key.
        float S_rmem[ROWS][KEYS] = {};  // (ROWS, BLOCK_KV): column j * LANES_KV + lane_kv at [][j]
#pragma unroll UNROLL
        for (int d = 0; d < D; d += 4) {
            float4 k[KEYS];
#pragma unroll
            for (int j = 0; j < KEYS; ++j) k[j] = load4(&KV_smem[j * LANES_KV + lane_kv][d]);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float4 q = load4(&Q_smem[lane_row + r * LANES_Q][d]);
#pragma unroll
                for (int j = 0; j < KEYS; ++j) {
                    S_rmem[r][j] += q.x * k[j].x;
                    S_rmem[r][j] += q.y * k[j].y;
                    S_rmem[r][j] += q.z * k[j].z;
                    S_rmem[r][j] += q.w * k[j].w;
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int j = 0; j < KEYS; ++j) S_rmem[r][j] *= params.scale;
        }
        if (kv_begin + BLOCK_KV > first_visible) {  // some row does not see the whole tile
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int query = q_begin + lane_row + r * LANES_Q;
                const int visible = params.causal ? min(query + N - M + 1, N) : N;  // keys 0 ... visible - 1
#pragma unroll
                for (int j = 0; j < KEYS; ++j) {
                    if (kv_begin + j * LANES_KV + lane_kv >= visible) S_rmem[r][j] = -INFINITY;
                }
            }
        }
        __syncthreads();  // every warp is done with K before V overwrites it
        load_tile<D>(KV_smem, V + int64_t(kv_begin) * D, N - kv_begin);
        __syncthreads();  // V is whole before anyone reads what others copied

        // Online softmax: 8 lanes for each row, 8 keys for each lane.
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float m_new = m_rmem[r];
#pragma unroll
            for (int j = 0; j < KEYS; ++j) m_new = fmaxf(m_new, S_rmem[r][j]);
            m_new = row_max(m_new);
            // A row that has seen no key yet has m_new = -inf, and -inf - -inf is NaN: subtract 0, exp(-inf) is 0.
            const float subtract = m_new == -INFINITY ? 0 : m_new;
            float sum = 0;
#pragma unroll
            for (int j = 0; j < KEYS; ++j) {
                const float p = expf(S_rmem[r][j] - subtract);  // at most exp(0): it never overflows
                P_smem[lane_row + r * LANES_Q][j * LANES_KV + lane_kv] = p;
                sum += p;
            }
            const float rescale = expf(m_rmem[r] - subtract);
            m_rmem[r] = m_new;
            l_rmem[r] = l_rmem[r] * rescale + row_sum(sum);
#pragma unroll
            for (int c = 0; c < D / 32; ++c) O_rmem[r][c] = scaled(rescale, O_rmem[r][c]);
        }
        __syncwarp();  // P is whole before other lanes read it; other warps never do

        // O += P V.
#pragma unroll UNROLL
        for (int key = 0; key < BLOCK_KV; key += 4) {
            float4 v[4][D / 32];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int c = 0; c < D / 32; ++c) v[i][c] = load4(&KV_smem[key + i][c * 32 + lane_kv * 4]);
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float4 p = load4(&P_smem[lane_row + r * LANES_Q][key]);
#pragma unroll
                for (int c = 0; c < D / 32; ++c) {
                    O_rmem[r][c] = add_scaled(O_rmem[r][c], p.x, v[0][c]);
                    O_rmem[r][c] = add_scaled(O_rmem[r][c], p.y, v[1][c]);
                    O_rmem[r][c] = add_scaled(O_rmem[r][c], p.z, v[2][c]);
                    O_rmem[r][c] = add_scaled(O_rmem[r][c], p.w, v[3][c]);
                }
            }
        }
        __syncthreads();  // every warp is done with V before the next K overwrites it
    }

    // O is sum(exp(s - m) V) and l is sum(exp(s - m)). A row without keys (l = 0) gives 0, not 0 / 0, and lse = -inf.
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const Index row = lane_row + r * LANES_Q;
        if (q_begin + row >= M) break;
#pragma unroll
        for (int c = 0; c < D / 32; ++c) {
            const float4 o = l_rmem[r] == 0 ? float4{0, 0, 0, 0} : scaled(1 / l_rmem[r], O_rmem[r][c]);
            store4(&O[row * D + c * 32 + lane_kv * 4], o);
        }
        if (lane_kv == 0) params.lse[int64_t(head) * M + q_begin + row] = m_rmem[r] + logf(l_rmem[r]);
    }
}

void launch(const flash::Params& params, void* stream) {
    flash::dispatch_head_dim(params.head_dim, [&](auto head_dim) {
        constexpr int D = head_dim;
        const int q_tiles = (params.queries + BLOCK_Q - 1) / BLOCK_Q;
        const int blocks = params.batch * params.heads * q_tiles;
        flash::launch(attention_kernel<D>, dim3(blocks), dim3(THREADS), sizeof(Shared<D>), stream, params);
    });
}

}  // namespace

FLASH_REGISTER(launch)
