// v06: the same tiles, laid out so that the rows of a matrix are in different banks.
//
// Idea        ldmatrix reads 16 bytes of each of 8 rows in one turn if these are in different banks. So the chunks, of
//             16 bytes, that a row consists of change places: chunk c of row r is kept at c XOR r % 8. The copies write
//             it there, ldmatrix looks for it there, and nobody else needs to know.
// From v05    Only where a tile keeps an element. Rows padded by 16 bytes would do as well, but take room.
// Bottleneck  Waiting: a block's tensor cores are idle while it loads K, and again while it loads V. Other blocks of
//             the SM fill some of the gaps, but its registers have room for two to four of them only.
// Run         flash-tutorial run v06

#include "flash/fragment.cuh"
#include "flash/launch.cuh"
#include "flash/ptx/cp_async.cuh"
#include "flash/ptx/ldmatrix.cuh"
#include "flash/ptx/mma.cuh"
#include "flash/swizzle.cuh"

namespace {

using flash::pack;
using flash::ptx::cp_async, flash::ptx::cp_async_wait_all, flash::ptx::ldmatrix_x4, flash::ptx::mma_m16n8k16;

enum class Copies { async, sync };
enum class Reduce { shuffle, shared };
enum class Layout { swizzled, padded, row_major };

constexpr int WARP = 32;
constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int BLOCK_Q = 64;
constexpr int BLOCK_KV = 64;
constexpr Copies COPIES = Copies::async;     // sync: through registers, 16 bytes at a time
constexpr Reduce REDUCE = Reduce::shuffle;   // shared: a row's maximum and sum by way of shared memory
constexpr Layout LAYOUT = Layout::swizzled;  // padded: 16 bytes after every row; row_major: as in v05
constexpr unsigned ALL_LANES = 0xffffffff;
static_assert(BLOCK_Q == WARPS * 16, "a warp owns the 16 rows of an mma.sync");
static_assert(BLOCK_KV % 16 == 0, "16 keys are one step of P V");

// Blocks of an SM: at D = 128, 64 and 32 they leave a thread 255, 168 and 128 registers.
template <int D>
constexpr int BLOCKS = 2 + (D <= 64) + (D <= 32);

// ROWS x D elements in shared memory, row after row.
template <class Element, int ROWS, int D>
struct Tile {
    Element elements[ROWS][LAYOUT == Layout::padded ? D + 8 : D];

    __device__ Element* at(int row, int column) {
        return &elements[row][LAYOUT == Layout::swizzled ? flash::swizzle<D>(row, column) : column];
    }
};

template <class Element, int D>
struct Shared {
    static_assert(D % 16 == 0, "16 columns are one step of Q K^T");

    Tile<Element, BLOCK_Q, D> Q;
    Tile<Element, BLOCK_KV, D> K, V;
    float4 parts[REDUCE == Reduce::shared ? BLOCK_Q : 1];  // a row's maximum, or sum, from each of its 4 lanes
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
        Element* shared = tile.at(row, column);
        const Element* global = first + i * D;
        if constexpr (COPIES == Copies::async)
            cp_async<16>(shared, global, row < rows ? 16 : 0);
        else
            *reinterpret_cast<uint4*>(shared) =
                row < rows ? *reinterpret_cast<const uint4*>(global) : uint4{0, 0, 0, 0};
    }
}

struct Maximum {
    __device__ float operator()(float x, float y) const { return fmaxf(x, y); }
};
struct Sum {
    __device__ float operator()(float x, float y) const { return x + y; }
};

// Over the 4 lanes that share a row, which are neighbours. `parts` is the row's.
template <class Combine>
__device__ float over_row(Combine combine, float x, float4& parts) {
    if constexpr (REDUCE == Reduce::shuffle) {
        x = combine(x, __shfl_xor_sync(ALL_LANES, x, 1));
        return combine(x, __shfl_xor_sync(ALL_LANES, x, 2));
    } else {
        reinterpret_cast<float*>(&parts)[threadIdx.x % 4] = x;
        __syncwarp();  // all four parts are there before anyone reads them
        const float4 all = parts;
        __syncwarp();  // everyone has read them before the next ones come
        return combine(combine(all.x, all.y), combine(all.z, all.w));
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
    auto& [Q_smem, K_smem, V_smem, parts_smem] = *flash::dynamic_shared<Shared<Element, D>>();

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

    // Q stays in fragments: the block reads it from shared memory once.
    uint32_t Q_rmem[D / 16][4];  // (16, D): 16 columns at each [d]
    load_tile(Q_smem, Q, M - q_begin);
    cp_async_wait_all();  // this thread's part of Q has landed
    __syncthreads();      // Q is whole before anyone reads what others copied
#pragma unroll
    for (int d = 0; d < D / 16; ++d) ldmatrix_x4(Q_rmem[d], Q_smem.at(warp_id * 16 + block_row, d * 16 + block_column));

    for (int kv_tile = 0; kv_tile < kv_tiles; ++kv_tile) {
        const int kv_begin = kv_tile * BLOCK_KV;
        load_tile(K_smem, K + int64_t(kv_begin) * D, N - kv_begin);
        cp_async_wait_all();  // this thread's part of K has landed
        __syncthreads();      // K is whole before anyone reads it, and everyone is done with V

        // S = scale Q K^T, -inf where the query does not see the key. Rows of K are columns of K^T: as they lie.
        float S_rmem[BLOCK_KV / 8][4] = {};  // (16, BLOCK_KV): 8 keys at each [j]
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
            uint32_t K_rmem[BLOCK_KV / 16][4];  // (16, BLOCK_KV) of K^T: 16 keys at each [j], two operands of 8
#pragma unroll
            for (int j = 0; j < BLOCK_KV / 16; ++j)
                ldmatrix_x4(K_rmem[j], K_smem.at(j * 16 + key, d * 16 + key_column));
#pragma unroll
            for (int j = 0; j < BLOCK_KV / 16; ++j) {
                mma_m16n8k16<Element>(S_rmem[2 * j], Q_rmem[d], {K_rmem[j][0], K_rmem[j][1]});
                mma_m16n8k16<Element>(S_rmem[2 * j + 1], Q_rmem[d], {K_rmem[j][2], K_rmem[j][3]});
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
            float4& parts = parts_smem[REDUCE == Reduce::shared ? lane_row + r * 8 : 0];
            float m_new = m_rmem[r];
#pragma unroll
            for (int j = 0; j < BLOCK_KV / 8; ++j) m_new = fmaxf(m_new, fmaxf(S_rmem[j][2 * r], S_rmem[j][2 * r + 1]));
            m_new = over_row(Maximum{}, m_new, parts);
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
            l_rmem[r] = l_rmem[r] * rescale + over_row(Sum{}, sum, parts);
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

        load_tile(V_smem, V + int64_t(kv_begin) * D, N - kv_begin);
        cp_async_wait_all();  // this thread's part of V has landed
        __syncthreads();      // V is whole before anyone reads it, and everyone is done with K

        // O += P V. Rows of V are rows of the product's second operand: transposed on the way.
#pragma unroll
        for (int j = 0; j < BLOCK_KV / 16; ++j) {
            uint32_t V_rmem[D / 16][4];  // (16, D): 16 columns at each [c], two operands of 8
#pragma unroll
            for (int c = 0; c < D / 16; ++c)
                ldmatrix_x4<true>(V_rmem[c], V_smem.at(j * 16 + block_row, c * 16 + block_column));
#pragma unroll
            for (int c = 0; c < D / 16; ++c) {
                mma_m16n8k16<Element>(O_rmem[2 * c], P_rmem[j], {V_rmem[c][0], V_rmem[c][1]});
                mma_m16n8k16<Element>(O_rmem[2 * c + 1], P_rmem[j], {V_rmem[c][2], V_rmem[c][3]});
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
