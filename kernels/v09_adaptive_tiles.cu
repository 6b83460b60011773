// v09: tiles that suit the problem.
//
// Idea        A warp that owns 32 rows multiplies every fragment of K and V twice: half the reads of shared memory for
//             the same products. But then blocks are large, and few where sequences are short. So the kernel is a
//             template, compiled for a handful of tile shapes, and each launch takes one: measured by
//             `flash-tutorial tune`, or on a GPU that nobody tuned the largest of which there are enough for its SMs.
// From v08    Rows come in bands of 16, one or two to a warp, and a fragment is loaded right before it is multiplied:
//             there are no registers for the next step's. Causal blocks start with the longest ones. q, k and v are
//             read with the strides they have. The choices that v07 and v08 measured are made.
// Bottleneck  Instructions around the products: addresses of fragments and copies, the mask asked for in every tile.
// Run         flash-tutorial run v09

#include "flash/fragment.cuh"
#include "flash/launch.cuh"
#include "flash/ptx/cp_async.cuh"
#include "flash/ptx/ex2.cuh"
#include "flash/ptx/ldmatrix.cuh"
#include "flash/ptx/mma.cuh"
#include "flash/shape.cuh"
#include "flash/shift.cuh"
#include "flash/softmax.cuh"
#include "flash/tile.cuh"

namespace {

using flash::band, flash::pack, flash::row_max, flash::row_sum, flash::Shape, flash::Shift, flash::Tile;
using flash::ptx::cp_async, flash::ptx::cp_async_commit_group, flash::ptx::cp_async_wait_group;
using flash::ptx::ex2, flash::ptx::ldmatrix_x4, flash::ptx::mma_m16n8k16;

constexpr int WARP = 32;
constexpr int TILES = -1;              // the number of the one shape that is compiled; -1: all are
constexpr float LOG2_E = 1.44269504f;  // e^x is 2^(LOG2_E x)

// By number, in the order of versions.py's words: the article's three; one stage; 16 and 32 rows a warp.
using Shapes = std::tuple<Shape<32, 32, 2, 2>, Shape<64, 32, 4, 2>, Shape<64, 64, 4, 2>, Shape<64, 64, 4, 1>,
                          Shape<128, 64, 8, 2>, Shape<128, 64, 4, 1>>;
constexpr int SMALL = 0, MEDIUM = 2, LARGE = 5;

// Q stays in fragments if these are 32 registers at most; else it is read from shared memory for every tile.
template <int D, class Shape>
constexpr bool KEEP_Q = Shape::BANDS * D <= 128;

// Blocks of an SM. Where 16, 12 or 8 warps share its registers, a thread has 128, 168 or 255: its part of S and O, of Q
// if it stays, and 56 more.
template <int D, class Shape>
constexpr int FRAGMENTS = Shape::BANDS * (Shape::BLOCK_KV / 2 + D / 2 + (KEEP_Q<D, Shape> ? D / 4 : 0));
template <int D, class Shape>
constexpr int BLOCKS = (FRAGMENTS<D, Shape> <= 72    ? 16
                        : FRAGMENTS<D, Shape> <= 112 ? 12
                                                     : 8) /
                       Shape::WARPS;

template <class Element, int D, class Shape>
struct Shared {
    static_assert(D % 16 == 0, "16 columns are one step of Q K^T");

    Tile<Element, Shape::BLOCK_Q, D> Q;
    Tile<Element, Shape::BLOCK_KV, D> K[Shape::STAGES], V[Shape::STAGES];
};

// Copies the first ROWS rows of a (rows, D) matrix, `stride` elements apart, 16 bytes at a time. Rows past its end
// become zeros: they meet P = 0 in P V, and 0 times what shared memory held before could be NaN.
template <int THREADS, class Element, int ROWS, int D>
__device__ void load_tile(Tile<Element, ROWS, D>& tile, const Element* matrix, int64_t stride, int rows) {
    constexpr int CHUNK = 16 / sizeof(Element);  // elements
    constexpr int STEP = THREADS * CHUNK / D;    // rows that the block copies at a time
    static_assert(ROWS % STEP == 0, "every thread copies as many chunks");
    const int first_row = threadIdx.x / (D / CHUNK), column = threadIdx.x % (D / CHUNK) * CHUNK;
    const Element* first = &matrix[first_row * stride + column];
    rows -= first_row;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP) {
        cp_async<16>(tile.at(first_row + i, column), first + i * stride, i < rows ? 16 : 0);
    }
}

template <class Element, int D, class Shape>
__global__ void __launch_bounds__(Shape::THREADS, BLOCKS<D, Shape>) attention_kernel(flash::Params params) {
    constexpr int BLOCK_Q = Shape::BLOCK_Q, BLOCK_KV = Shape::BLOCK_KV, STAGES = Shape::STAGES, BANDS = Shape::BANDS;
    constexpr int PENDING = 2 * (STAGES - 1);  // groups of copies that a wait leaves in flight
    constexpr bool KEPT = KEEP_Q<D, Shape>;
    const int M = params.queries, N = params.keys;
    const int q_tiles = (M + BLOCK_Q - 1) / BLOCK_Q, heads = params.batch * params.heads;
    // Where later queries see more keys, the last tiles of all heads come first: short blocks fill the gaps at the end.
    const int q_tile = params.causal ? q_tiles - 1 - blockIdx.x / heads : blockIdx.x % q_tiles;
    const int head = params.causal ? blockIdx.x % heads : blockIdx.x / q_tiles;  // of batch * heads
    const int batch = head / params.heads, q_head = head % params.heads;
    const int kv_head = q_head / (params.heads / params.kv_heads);
    const int q_begin = q_tile * BLOCK_Q;
    const int warp_id = threadIdx.x / WARP, lane_id = threadIdx.x % WARP;
    const flash::Strides &q = params.q_strides, &k = params.k_strides, &v = params.v_strides;
    const Element* Q = static_cast<const Element*>(params.q) + batch * q.batch + q_head * q.head + q_begin * q.row;
    const Element* K = static_cast<const Element*>(params.k) + batch * k.batch + kv_head * k.head;  // (N, D)
    const Element* V = static_cast<const Element*>(params.v) + batch * v.batch + kv_head * v.head;  // (N, D)
    auto& shared = *flash::dynamic_shared<Shared<Element, D, Shape>>();
    auto& Q_smem = shared.Q;
    auto& K_smem = shared.K;
    auto& V_smem = shared.V;

    // Of an accumulator, 16 x 8, a lane holds rows lane_row and lane_row + 8, at [0], [1] and at [2], [3], and there
    // columns lane_column and lane_column + 1; of the second band, rows lane_row + 16 and + 24, at [4] to [7].
    const int warp_row = warp_id * BANDS * 16, lane_row = warp_row + lane_id / 4, lane_column = lane_id % 4 * 2;
    // To ldmatrix every lane names one row, from one column on, of a 16 x 16 block: of its four 8 x 8 matrices the
    // upper left one first, and then the lower left one, except for K, whose rows are the columns of K^T.
    const int q_offset = Q_smem.offset(warp_row + lane_id % 16, lane_id / 16 * 8);
    const int k_offset = K_smem[0].offset(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2 * 8);
    const int v_offset = V_smem[0].offset(lane_id % 16, lane_id / 16 * 8);

    float O_rmem[D / 8][4 * BANDS] = {};  // (16 BANDS, D): 8 columns at each [c]; sum of P V
    float m_rmem[2 * BANDS];              // (2 BANDS), of the lane's rows, the same in 4 lanes: running maximum
    float l_rmem[2 * BANDS] = {};         // (2 BANDS), running sum of P, of the lane's columns
    for (float& m : m_rmem) m = -INFINITY;

    // A positive scale waits for the power, unless LOG2_E times it is too large a number.
    const bool waits = params.scale > 0 && params.scale < 1e38f;
    const float scale = waits ? params.scale : 1, factor = LOG2_E * scale;

    const int first_visible = params.causal ? min(q_begin + 1 + N - M, N) : N;               // keys the first row sees
    const int last_visible = params.causal ? min(min(q_begin + BLOCK_Q, M) + N - M, N) : N;  // keys the last row sees
    const int kv_tiles = (max(last_visible, 0) + BLOCK_KV - 1) / BLOCK_KV;
    // One group for each tile, also for one that does not exist: waits count groups.
    auto load = [&](auto& tiles, int tile, const Element* matrix, int64_t stride) {
        const int begin = tile * BLOCK_KV;
        if (tile < kv_tiles)
            load_tile<Shape::THREADS>(tiles[tile % STAGES], matrix + begin * stride, stride, N - begin);
        cp_async_commit_group();
    };
    auto load_k = [&](int tile) { load(K_smem, tile, K, k.row); };
    auto load_v = [&](int tile) { load(V_smem, tile, V, v.row); };
    load_tile<Shape::THREADS>(Q_smem, Q, q.row, M - q_begin);
    cp_async_commit_group();
#pragma unroll
    for (int tile = 0; tile < STAGES; ++tile) {
        if (tile > 0) load_v(tile - 1);
        load_k(tile);
    }

    uint32_t Q_rmem[KEPT ? D / 16 : 1][BANDS][4];  // (16 BANDS, D): 16 columns at each [d], or those of one step
    auto load_q_fragments = [&](int d) {
#pragma unroll
        for (int t = 0; t < BANDS; ++t) ldmatrix_x4(Q_rmem[KEPT ? d : 0][t], Q_smem.beside(q_offset, t * 16, d * 16));
    };
    if constexpr (KEPT) {
        cp_async_wait_group<PENDING + 1>();  // this thread's part of Q has landed
        __syncthreads();                     // Q is whole before anyone reads it
#pragma unroll
        for (int d = 0; d < D / 16; ++d) load_q_fragments(d);
    }

    for (int kv_tile = 0; kv_tile < kv_tiles; ++kv_tile) {
        const int kv_begin = kv_tile * BLOCK_KV;
        cp_async_wait_group<PENDING>();  // this thread's part of K, and of Q, has landed
        __syncthreads();                 // K is whole before anyone reads it, and everyone is done with the V before
        load_v(kv_tile + STAGES - 1);

        // S = Q K^T, -inf where the query does not see the key. Rows of K are columns of K^T: as they lie.
        float S_rmem[BLOCK_KV / 8][4 * BANDS] = {};  // (16 BANDS, BLOCK_KV): 8 keys at each [j]
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
            if (!KEPT) load_q_fragments(d);
#pragma unroll
            for (int j = 0; j < BLOCK_KV / 16; ++j) {
                uint32_t k[4];  // (16, 16) of K^T, two operands
                ldmatrix_x4(k, K_smem[kv_tile % STAGES].beside(k_offset, j * 16, d * 16));
#pragma unroll
                for (int t = 0; t < BANDS; ++t) {
                    mma_m16n8k16<Element>(band(S_rmem[2 * j], t), Q_rmem[KEPT ? d : 0][t], {k[0], k[1]});
                    mma_m16n8k16<Element>(band(S_rmem[2 * j + 1], t), Q_rmem[KEPT ? d : 0][t], {k[2], k[3]});
                }
            }
        }
        if (!waits) {
#pragma unroll
            for (int j = 0; j < BLOCK_KV / 8; ++j) {
#pragma unroll
                for (int i = 0; i < 4 * BANDS; ++i) S_rmem[j][i] *= params.scale;
            }
        }
        if (kv_begin + BLOCK_KV > first_visible) {  // some row does not see the whole tile
#pragma unroll
            for (int i = 0; i < 4 * BANDS; ++i) {
                const int query = q_begin + lane_row + i / 2 * 8;
                const int visible = params.causal ? min(query + N - M + 1, N) : N;  // keys 0 ... visible - 1
#pragma unroll
                for (int j = 0; j < BLOCK_KV / 8; ++j) {
                    if (kv_begin + j * 8 + lane_column + i % 2 >= visible) S_rmem[j][i] = -INFINITY;
                }
            }
        }

        // Online softmax: 4 lanes for each row, 2 rows of a band for each lane.
#pragma unroll
        for (int r = 0; r < 2 * BANDS; ++r) {
            float m_new = m_rmem[r];
#pragma unroll
            for (int j = 0; j < BLOCK_KV / 8; ++j) m_new = fmaxf(m_new, fmaxf(S_rmem[j][2 * r], S_rmem[j][2 * r + 1]));
            m_new = row_max(m_new);
            const Shift shift = Shift::to(m_new, factor);
            if (shift.base != 0) {
#pragma unroll
                for (int j = 0; j < BLOCK_KV / 8; ++j) {
                    S_rmem[j][2 * r] -= shift.base;
                    S_rmem[j][2 * r + 1] -= shift.base;
                }
            }
            // A row that has seen no key yet has m_new = -inf, and -inf - -inf is NaN: subtract 0, exp(-inf) is 0.
            const float subtract = m_new == -INFINITY ? 0 : shift.scaled;
            float sum = 0;
#pragma unroll
            for (int j = 0; j < BLOCK_KV / 8; ++j) {
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; ++i) {
                    S_rmem[j][i] = ex2(fmaf(S_rmem[j][i], factor, -subtract));
                    sum += S_rmem[j][i];
                }
            }
            const Shift old = Shift::to(m_rmem[r], factor);
            const float rescale = ex2(fmaf(old.base - shift.base, factor, old.scaled - subtract));
            l_rmem[r] = l_rmem[r] * rescale + sum;
#pragma unroll
            for (int c = 0; c < D / 8; ++c) {
                O_rmem[c][2 * r] *= rescale;
                O_rmem[c][2 * r + 1] *= rescale;
            }
            m_rmem[r] = m_new;
        }
        // Two accumulators side by side are one operand: what a lane holds of S is what it has to hold of P.
        uint32_t P_rmem[BLOCK_KV / 16][BANDS][4];  // (16 BANDS, BLOCK_KV): 16 keys at each [j]; exp(s - m')
#pragma unroll
        for (int j = 0; j < BLOCK_KV / 16; ++j) {
#pragma unroll
            for (int i = 0; i < 4 * BANDS; ++i) {
                const float (&s)[4 * BANDS] = S_rmem[2 * j + i / 2 % 2];
                P_rmem[j][i / 4][i % 4] = pack<Element>(s[i / 4 * 4 + i % 2 * 2], s[i / 4 * 4 + i % 2 * 2 + 1]);
            }
        }

        cp_async_wait_group<PENDING>();  // this thread's part of V has landed
        __syncthreads();                 // V is whole before anyone reads it, and everyone is done with this K
        load_k(kv_tile + STAGES);

        // O += P V. Rows of V are rows of the product's second operand: transposed on the way.
#pragma unroll
        for (int j = 0; j < BLOCK_KV / 16; ++j) {
#pragma unroll
            for (int c = 0; c < D / 16; ++c) {
                uint32_t v[4];  // (16, 16), two operands
                ldmatrix_x4<true>(v, V_smem[kv_tile % STAGES].beside(v_offset, j * 16, c * 16));
#pragma unroll
                for (int t = 0; t < BANDS; ++t) {
                    mma_m16n8k16<Element>(band(O_rmem[2 * c], t), P_rmem[j][t], {v[0], v[1]});
                    mma_m16n8k16<Element>(band(O_rmem[2 * c + 1], t), P_rmem[j][t], {v[2], v[3]});
                }
            }
        }
    }

    for (float& l : l_rmem) l = row_sum(l);

    Element* O = static_cast<Element*>(params.out) + (int64_t(head) * M + q_begin) * D;  // (M - q_begin, D)
    // O is sum(exp(s - m) V) and l is sum(exp(s - m)). A row without keys (l = 0) gives 0, not 0 / 0, and lse = -inf.
#pragma unroll
    for (int r = 0; r < 2 * BANDS; ++r) {
        const int row = lane_row + r * 8;
        if (q_begin + row >= M) break;
        const float inverse = l_rmem[r] == 0 ? 0 : 1 / l_rmem[r];
#pragma unroll
        for (int c = 0; c < D / 8; ++c) {
            const uint32_t o = pack<Element>(O_rmem[c][2 * r] * inverse, O_rmem[c][2 * r + 1] * inverse);
            *reinterpret_cast<uint32_t*>(&O[row * D + c * 8 + lane_column]) = o;
        }
        const Shift shift = Shift::to(m_rmem[r], factor);
        const float lse = fmaf(shift.base, scale, shift.scaled * (1 / LOG2_E)) + logf(l_rmem[r]);
        if (lane_id % 4 == 0) params.lse[int64_t(head) * M + q_begin + row] = lse;
    }
}

// The number of the shape that a launch takes of its own accord: the largest that half fills with queries, and of which
// there are blocks enough to give every SM 8 warps, which hide each other's waits.
int choose_tiles(const flash::Params& params) {
    if (TILES != -1) return TILES;
    auto suits = [&](auto shape) {
        const int64_t q_tiles = (params.queries + shape.BLOCK_Q - 1) / shape.BLOCK_Q;
        const int64_t warps = q_tiles * params.batch * params.heads * shape.WARPS;
        return params.queries > shape.BLOCK_Q / 2 && warps >= 8 * flash::sm_count();
    };
    if (suits(std::tuple_element_t<LARGE, Shapes>())) return LARGE;
    return suits(std::tuple_element_t<MEDIUM, Shapes>()) ? MEDIUM : SMALL;
}

void launch(const flash::Params& params, void* stream) {
    flash::dispatch_element(params.dtype, [&](auto element) {
        flash::dispatch_head_dim(params.head_dim, [&](auto head_dim) {
            auto launch_shape = [&](auto shape) {
                using Element = decltype(element);
                using Shape = decltype(shape);
                constexpr int D = head_dim;
                static_assert(sizeof(Shared<Element, D, Shape>) <= 101376, "consumer Ampere and Ada GPUs have no more");
                const int q_tiles = (params.queries + Shape::BLOCK_Q - 1) / Shape::BLOCK_Q;
                const int blocks = params.batch * params.heads * q_tiles;
                flash::launch(attention_kernel<Element, D, Shape>, dim3(blocks), dim3(Shape::THREADS),
                              sizeof(Shared<Element, D, Shape>), stream, params);
            };
            flash::dispatch_shape<Shapes, TILES>(TILES == -1 ? params.tiles : TILES, launch_shape);
        });
    });
}

}  // namespace

FLASH_REGISTER_TILED(launch, choose_tiles)
