// v07: loads that run ahead of the products.
//
// Idea        A copy takes longer than a product, so it has to begin before its result is needed. Shared memory holds
//             two tiles of K and two of V: while one is multiplied the next is on its way. And so one level up:
//             fragments of a step are loaded while the step before is multiplied.
// From v06    Copies come in groups, K and V in turns, and a wait leaves the younger ones in flight. The choices that
//             v05 and v06 measured are made: cp.async, shuffles, swizzled tiles.
// Bottleneck  The softmax: while a warp is at its exponentials, multiplications and sums, its tensor core waits.
// Run         flash-tutorial run v07

#include "flash/fragment.cuh"
#include "flash/launch.cuh"
#include "flash/ptx/cp_async.cuh"
#include "flash/ptx/ldmatrix.cuh"
#include "flash/ptx/mma.cuh"
#include "flash/softmax.cuh"
#include "flash/swizzle.cuh"

namespace {

using flash::pack, flash::row_max, flash::row_sum;
using flash::ptx::cp_async, flash::ptx::cp_async_commit_group, flash::ptx::cp_async_wait_group;
using flash::ptx::ldmatrix_x4, flash::ptx::mma_m16n8k16;

enum class Loads { eager, lazy };

constexpr int WARP = 32;
constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int BLOCK_Q = 64;
constexpr int BLOCK_KV = 64;
constexpr int STAGES = 2;              // tiles of K, and of V, in shared memory
constexpr Loads LOADS = Loads::eager;  // as soon as there is room for the tile; lazy: when it is needed
constexpr int AHEAD = 1;               // steps of a product whose fragments are loaded before one is multiplied
constexpr int PENDING = LOADS == Loads::eager ? 2 * (STAGES - 1) : 0;  // groups of copies that a wait leaves in flight
static_assert(BLOCK_Q == WARPS * 16, "a warp owns the 16 rows of an mma.sync");
static_assert(BLOCK_KV % 16 == 0, "16 keys are one step of P V");

// Blocks of an SM: at D = 128, 64 and 32 they leave a thread 255, 168 and 128 registers.
template <int D>
constexpr int BLOCKS = 2 + (D <= 64) + (D <= 32);

// ROWS x D elements in shared memory, row after row.
template <class Element, int ROWS, int D>
struct Tile {
    Element elements[ROWS][D];

    __device__ Element* at(int row, int column) { return &elements[row][flash::swizzle<D>(row, column)]; }
};

template <class Element, int D>
struct Shared {
    static_assert(D % 16 == 0, "16 columns are one step of Q K^T");

    Tile<Element, BLOCK_Q, D> Q;
    Tile<Element, BLOCK_KV, D> K[STAGES], V[STAGES];
};
static_assert(sizeof(Shared<__half, 128>) <= 101376, "a block fits on consumer Ampere and Ada GPUs");

// Copies the first ROWS rows of a (rows, D) matrix, 16 bytes at a time. Rows past its end become zeros: they meet P = 0
// in P V, and 0 times what shared memory held before could be NaN.
template <class Element, int ROWS, int D>
__device__ void load_tile(Tile<Element, ROWS, D>& tile, const Element* matrix, int rows) {
    constexpr int CHUNK = 16 / sizeof(Element);  // elements
    constexpr int STEP = THREADS * CHUNK / D;    // rows that the block copies at a time
    static_assert(ROWS % STEP == 0, "every thread copies as many chunks");
    const int first_row = threadIdx.x / (D / CHUNK), column = threadIdx.x % (D / CHUNK) * CHUNK;
    const Element* first = &matrix[first_row * D + column];
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP) {
        const int row = first_row + i;
        cp_async<16>(tile.at(row, column), first + i * D, row < rows ? 16 : 0);
    }
}

template <class Element, int D>
__global__ void __launch_bounds__(THREADS, BLOCKS<D>) attention_kernel(flash::Params params) {
    const int M = params.queries, N = params.keys;
    const int q_tiles = (M + BLOCK_Q - 1) / BLOCK_Q;
    const int head = blockIdx.x / q_tiles;                        // of batch * heads
    const int kv_head = head / (params.heads / params.kv_heads);  // of batch * kv_heads
    const int q_begin = blockIdx.x % q_tiles * BLOCK_Q;
    const int warp_id = threadIdx.x / WARP, lane_id = threadIdx.x % WARP;
    const Element* Q = static_cast<const Element*>(params.q) + (int64_t(head) * M + q_begin) * D;  // (M - q_begin, D)
    const Element* K = static_cast<const Element*>(params.k) + int64_t(kv_head) * N * D;           // (N, D)
    const Element* V = static_cast<const Element*>(params.v) + int64_t(kv_head) * N * D;           // (N, D)
    Element* O = static_cast<Element*>(params.out) + (int64_t(head) * M + q_begin) * D;            // (M - q_begin, D)
    auto& shared = *flash::dynamic_shared<Shared<Element, D>>();
    auto& Q_smem = shared.Q;
    auto& K_smem = shared.K;
    auto& V_smem = shared.V;

    // Of an accumulator, 16 x 8, a lane holds rows lane_row and lane_row + 8, at [0], [1] and at [2], [3], and there
    // columns lane_column and lane_column + 1.
    const int lane_row = warp_id * 16 + lane_id / 4, lane_column = lane_id % 4 * 2;
    // To ldmatrix every lane names one row, from one column on, of a 16 x 16 block: of its four 8 x 8 matrices the
    // upper left one first, and then the lower left one, except for K, whose rows are the columns of K^T.
    const int block_row = lane_id % 16, block_column = lane_id / 16 * 8;
    const int key = lane_id / 16 * 8 + lane_id % 8, key_column = lane_id / 8 % 2 * 8;

    float O_rmem[D / 8][4] = {};               // (16, D): 8 columns at each [c]; sum of P V
    float m_rmem[2] = {-INFINITY, -INFINITY};  // (2), of the lane's rows, the same in 4 lanes: running maximum
    float l_rmem[2] = {};                      // (2), the same in 4 lanes: running sum of P

    const int first_visible = params.causal ? min(q_begin + 1 + N - M, N) : N;               // keys the first row sees
    const int last_visible = params.causal ? min(min(q_begin + BLOCK_Q, M) + N - M, N) : N;  // keys the last row sees
    const int kv_tiles = (max(last_visible, 0) + BLOCK_KV - 1) / BLOCK_KV;
    // One group for each tile, also for one that does not exist: waits count groups.
    auto load_k = [&](int tile) {
        if (tile < kv_tiles) load_tile(K_smem[tile % STAGES], K + int64_t(tile) * BLOCK_KV * D, N - tile * BLOCK_KV);
        cp_async_commit_group();
    };
    auto load_v = [&](int tile) {
        if (tile < kv_tiles) load_tile(V_smem[tile % STAGES], V + int64_t(tile) * BLOCK_KV * D, N - tile * BLOCK_KV);
        cp_async_commit_group();
    };
    load_tile(Q_smem, Q, M - q_begin);
    cp_async_commit_group();
    if constexpr (LOADS == Loads::eager) {
#pragma unroll
        for (int tile = 0; tile < STAGES; ++tile) {
            if (tile > 0) load_v(tile - 1);
            load_k(tile);
        }
    }

    // Q stays in fragments: the block reads it from shared memory once.
    uint32_t Q_rmem[D / 16][4];                                      // (16, D): 16 columns at each [d]
    cp_async_wait_group<LOADS == Loads::eager ? PENDING + 1 : 0>();  // this thread's part of Q has landed
    __syncthreads();                                                 // Q is whole before anyone reads it
#pragma unroll
    for (int d = 0; d < D / 16; ++d) ldmatrix_x4(Q_rmem[d], Q_smem.at(warp_id * 16 + block_row, d * 16 + block_column));

    for (int kv_tile = 0; kv_tile < kv_tiles; ++kv_tile) {
        const int kv_begin = kv_tile * BLOCK_KV;
        if constexpr (LOADS == Loads::lazy) load_k(kv_tile);
        cp_async_wait_group<PENDING>();  // this thread's part of K has landed
        __syncthreads();                 // K is whole before anyone reads it, and everyone is done with the V before
        if constexpr (LOADS == Loads::eager) load_v(kv_tile + STAGES - 1);

        // S = scale Q K^T, -inf where the query does not see the key. Rows of K are columns of K^T: as they lie.
        float S_rmem[BLOCK_KV / 8][4] = {};            // (16, BLOCK_KV): 8 keys at each [j]
        uint32_t K_rmem[AHEAD + 1][BLOCK_KV / 16][4];  // (16, BLOCK_KV) of K^T: 16 keys at each [][j], two operands
        auto load_k_fragments = [&](int d) {
#pragma unroll
            for (int j = 0; j < BLOCK_KV / 16; ++j)
                ldmatrix_x4(K_rmem[d % (AHEAD + 1)][j], K_smem[kv_tile % STAGES].at(j * 16 + key, d * 16 + key_column));
        };
#pragma unroll
        for (int d = -AHEAD; d < D / 16; ++d) {
            if (d + AHEAD < D / 16) load_k_fragments(d + AHEAD);
            if (d < 0) continue;
#pragma unroll
            for (int j = 0; j < BLOCK_KV / 16; ++j) {
                const uint32_t (&k)[4] = K_rmem[d % (AHEAD + 1)][j];
                mma_m16n8k16<Element>(S_rmem[2 * j], Q_rmem[d], {k[0], k[1]});
                mma_m16n8k16<Element>(S_rmem[2 * j + 1], Q_rmem[d], {k[2], k[3]});
            }
        }
#pragma unroll
        for (int j = 0; j < BLOCK_KV / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) S_rmem[j][i] *= params.scale;
        }
        if (kv_begin + BLOCK_KV > first_visible) {  // some row does not see the whole tile
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int query = q_begin + lane_row + i / 2 * 8;
                const int visible = params.causal ? min(query + N - M + 1, N) : N;  // keys 0 ... visible - 1
#pragma unroll
                for (int j = 0; j < BLOCK_KV / 8; ++j) {
                    if (kv_begin + j * 8 + lane_column + i % 2 >= visible) S_rmem[j][i] = -INFINITY;
                }
            }
        }

        // Online softmax: 4 lanes for each row, 2 rows for each lane.
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float m_new = m_rmem[r];
#pragma unroll
            for (int j = 0; j < BLOCK_KV / 8; ++j) m_new = fmaxf(m_new, fmaxf(S_rmem[j][2 * r], S_rmem[j][2 * r + 1]));
            m_new = row_max(m_new);
            // A row that has seen no key yet has m_new = -inf, and -inf - -inf is NaN: subtract 0, exp(-inf) is 0.
            const float subtract = m_new == -INFINITY ? 0 : m_new;
            float sum = 0;
#pragma unroll
            for (int j = 0; j < BLOCK_KV / 8; ++j) {
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; ++i) {
                    S_rmem[j][i] = expf(S_rmem[j][i] - subtract);  // at most exp(0): it never overflows
                    sum += S_rmem[j][i];
                }
            }
            const float rescale = expf(m_rmem[r] - subtract);
            m_rmem[r] = m_new;
            l_rmem[r] = l_rmem[r] * rescale + row_sum(sum);
#pragma unroll
            for (int c = 0; c < D / 8; ++c) {
                O_rmem[c][2 * r] *= rescale;
                O_rmem[c][2 * r + 1] *= rescale;
            }
        }
        // Two accumulators side by side are one operand: what a lane holds of S is what it has to hold of P.
        uint32_t P_rmem[BLOCK_KV / 16][4];  // (16, BLOCK_KV): 16 keys at each [j]; exp(s - m')
#pragma unroll
        for (int j = 0; j < BLOCK_KV / 16; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                P_rmem[j][i] = pack<Element>(S_rmem[2 * j + i / 2][i % 2 * 2], S_rmem[2 * j + i / 2][i % 2 * 2 + 1]);
        }

        if constexpr (LOADS == Loads::lazy) load_v(kv_tile);
        cp_async_wait_group<PENDING>();  // this thread's part of V has landed
        __syncthreads();                 // V is whole before anyone reads it, and everyone is done with this K
        if constexpr (LOADS == Loads::eager) load_k(kv_tile + STAGES);

        // O += P V. Rows of V are rows of the product's second operand: transposed on the way.
        uint32_t V_rmem[AHEAD + 1][D / 16][4];  // (16, D): 16 columns at each [][c], two operands
        auto load_v_fragments = [&](int j) {
#pragma unroll
            for (int c = 0; c < D / 16; ++c)
                ldmatrix_x4<true>(V_rmem[j % (AHEAD + 1)][c],
                                  V_smem[kv_tile % STAGES].at(j * 16 + block_row, c * 16 + block_column));
        };
#pragma unroll
        for (int j = -AHEAD; j < BLOCK_KV / 16; ++j) {
            if (j + AHEAD < BLOCK_KV / 16) load_v_fragments(j + AHEAD);
            if (j < 0) continue;
#pragma unroll
            for (int c = 0; c < D / 16; ++c) {
                const uint32_t (&v)[4] = V_rmem[j % (AHEAD + 1)][c];
                mma_m16n8k16<Element>(O_rmem[2 * c], P_rmem[j], {v[0], v[1]});
                mma_m16n8k16<Element>(O_rmem[2 * c + 1], P_rmem[j], {v[2], v[3]});
            }
        }
    }

    // O is sum(exp(s - m) V) and l is sum(exp(s - m)). A row without keys (l = 0) gives 0, not 0 / 0, and lse = -inf.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = lane_row + r * 8;
        if (q_begin + row >= M) break;
        const float inverse = l_rmem[r] == 0 ? 0 : 1 / l_rmem[r];
#pragma unroll
        for (int c = 0; c < D / 8; ++c) {
            const uint32_t o = pack<Element>(O_rmem[c][2 * r] * inverse, O_rmem[c][2 * r + 1] * inverse);
            *reinterpret_cast<uint32_t*>(&O[row * D + c * 8 + lane_column]) = o;
        }
        if (lane_id % 4 == 0) params.lse[int64_t(head) * M + q_begin + row] = m_rmem[r] + logf(l_rmem[r]);
    }
}

void launch(const flash::Params& params, void* stream) {
    flash::dispatch_element(params.dtype, [&](auto element) {
        flash::dispatch_head_dim(params.head_dim, [&](auto head_dim) {
            using Element = decltype(element);
            constexpr int D = head_dim;
            const int q_tiles = (params.queries + BLOCK_Q - 1) / BLOCK_Q;
            const int blocks = params.batch * params.heads * q_tiles;
            flash::launch(attention_kernel<Element, D>, dim3(blocks), dim3(THREADS), sizeof(Shared<Element, D>), stream,
                          params);
        });
    });
}

}  // namespace

FLASH_REGISTER(launch)
