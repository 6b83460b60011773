// v10: fewer instructions around the products.
//
// Idea        What is the same for every tile is decided before the loop, and what is rare has code of its own. Tiles
//             come backwards: first those where keys are hidden or missing, in code that masks, then all others in code
//             that knows nothing of it. O is rescaled only when a maximum has grown by much (FlashAttention-4). Rows of
//             K and V that lie next to each other are at constants from each other. O leaves 16 bytes at a time.
// From v09    One stage in every shape, and tiles of more keys in the smallest, and up to D = 64 in the largest. A warp
//             skips a tile that none of its rows sees.
// Bottleneck  mma.sync itself: its operands go through registers, which a Hopper GPU's wgmma does without.
// Run         flash-tutorial run v10

#include "flash/arch.cuh"
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

using flash::band, flash::LaneRow, flash::pack, flash::row_max, flash::row_sum, flash::Shape, flash::Shift, flash::Tile;
using flash::ptx::cp_async, flash::ptx::cp_async_commit_group, flash::ptx::cp_async_wait_group;
using flash::ptx::ex2, flash::ptx::ldmatrix_x4, flash::ptx::mma_m16n8k16;

enum class Order { backward, forward };
enum class Masks { apart, asked };
enum class Skip { warp, never };
enum class Rescale { lazy, always };
enum class Rows { fixed, passed };
enum class Fragments { fitting, kept, loaded };
enum class Copy { fitting, early, late };
enum class Zeros { step, tile };
enum class Cache { l2, l1 };
enum class Epilogue { shared, half2, scalar };

constexpr Order ORDER = Order::backward;
constexpr Masks MASKS = Masks::apart;                  // code of its own for tiles with hidden keys, or a test in all
constexpr Skip SKIP = Skip::warp;                      // who leaves out a tile of which it sees nothing
constexpr Rescale RESCALE = Rescale::lazy;             // where a maximum has grown by more than GROWTH, or every time
constexpr Rows ROWS = Rows::fixed;                     // of K and V: D apart, where they are, or as passed
constexpr bool ENCODED = true;                         // addresses of fragments: one XOR, or from row and column
constexpr Fragments Q_FRAGMENTS = Fragments::fitting;  // kept if they fit, or loaded for 16 columns at a time
constexpr Copy K_COPY = Copy::fitting;                 // of the next K: before the softmax if that fits, or after it
constexpr Zeros ZEROS = Zeros::step;                   // in S: right before the first product, or before all of them
constexpr Cache CACHE = Cache::l2;                     // that keeps tiles of K and V
constexpr Epilogue EPILOGUE = Epilogue::shared;        // 16 bytes at a time; half2, scalar: 4 or 2, out of fragments
constexpr int TILES = -1;                              // the number of the one shape that is compiled; -1: all are
constexpr float GROWTH = 8;                            // an exponent of 2: P, l and O may be 2^8 times as large
constexpr float LOG2_E = 1.44269504f;                  // e^x is 2^(LOG2_E x)
constexpr int WARP = 32;

// By number, in the order of versions.py's words. The largest tile of keys has 16 KiB.
template <int D>
using Shapes = std::tuple<Shape<32, 64, 2, 1>, Shape<64, 64, 4, 1>, Shape<128, D == 128 ? 64 : 128, 4, 1>>;
constexpr int SMALL = 0, MEDIUM = 1, LARGE = 2;

// What a thread's registers hold: its part of S, of O, and of Q if it stays.
template <int D, class Shape>
struct Registers {
    static constexpr int S = Shape::BANDS * Shape::BLOCK_KV / 2, O = Shape::BANDS * D / 2, Q = Shape::BANDS * D / 4;
    static constexpr bool KEEP_Q =
        Q_FRAGMENTS == Fragments::fitting ? S + O + Q <= 176 : Q_FRAGMENTS == Fragments::kept;

    // Blocks of an SM. Where 16, 12 or 8 warps share its registers, a thread has 128, 168 or 255: these and 56 more.
    static constexpr int FRAGMENTS = S + O + (KEEP_Q ? Q : 0);
    static constexpr int BLOCKS = (FRAGMENTS <= 72 ? 16 : FRAGMENTS <= 112 ? 12 : 8) / Shape::WARPS;
};

template <class Element, int D, class Shape>
struct Shared {
    static_assert(D % 16 == 0, "16 columns are one step of Q K^T");

    Tile<Element, Shape::BLOCK_Q, D> Q;
    Tile<Element, Shape::BLOCK_KV, D> K, V;
};

// Copies the first ROWS rows of a (rows, D) matrix, `stride` elements apart, 16 bytes at a time. Rows past its end,
// unless it is known to have none, become zeros: they meet P = 0 in P V, and 0 times what shared memory held before
// could be NaN.
template <int THREADS, bool WHOLE, class Element, int ROWS, int D>
__device__ void load_tile(Tile<Element, ROWS, D>& tile, const Element* matrix, int64_t stride, int rows) {
    constexpr int CHUNK = 16 / sizeof(Element);  // elements
    constexpr int STEP = THREADS * CHUNK / D;    // rows that the block copies at a time
    static_assert(ROWS % STEP == 0, "every thread copies as many chunks");
    const int first_row = threadIdx.x / (D / CHUNK), column = threadIdx.x % (D / CHUNK) * CHUNK;
    const Element* first = &matrix[first_row * stride + column];
    rows -= first_row;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP) {
        const int bytes = WHOLE || i < rows ? 16 : 0;
        cp_async<16, CACHE == Cache::l2>(tile.at(first_row + i, column), first + i * stride, bytes);
    }
}

template <class Element, int D, class Shape, bool FIXED>
__global__ void __launch_bounds__(Shape::THREADS, Registers<D, Shape>::BLOCKS) attention_kernel(flash::Params params) {
    constexpr int BLOCK_Q = Shape::BLOCK_Q, BLOCK_KV = Shape::BLOCK_KV, BANDS = Shape::BANDS;
    constexpr bool KEEP_Q = Registers<D, Shape>::KEEP_Q;
    // Otherwise ptxas spills in the largest shape.
    constexpr bool EARLY_FITS = FIXED && (flash::ARCH >= 90 || Registers<D, Shape>::S <= 64);
    constexpr bool EARLY = K_COPY == Copy::fitting ? EARLY_FITS : K_COPY == Copy::early;
    constexpr bool BACKWARD = ORDER == Order::backward;
    constexpr int NEXT = BACKWARD ? -1 : 1;
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
    const int64_t k_row = FIXED ? D : k.row, v_row = FIXED ? D : v.row;
    auto& shared = *flash::dynamic_shared<Shared<Element, D, Shape>>();
    auto& Q_smem = shared.Q;
    auto& K_smem = shared.K;
    auto& V_smem = shared.V;

    // Of an accumulator, 16 x 8, a lane holds rows lane_row and lane_row + 8, at [0], [1] and at [2], [3], and there
    // columns lane_column and lane_column + 1; of the second band, rows lane_row + 16 and + 24, at [4] to [7].
    const int warp_row = warp_id * BANDS * 16, lane_row = warp_row + lane_id / 4, lane_column = lane_id % 4 * 2;
    // To ldmatrix every lane names one row, from one column on, of a 16 x 16 block: of its four 8 x 8 matrices the
    // upper left one first, and then the lower left one, except for K, whose rows are the columns of K^T.
    const LaneRow<ENCODED, Tile<Element, BLOCK_Q, D>> Q_lane{Q_smem, warp_row + lane_id % 16, lane_id / 16 * 8};
    const LaneRow<ENCODED, Tile<Element, BLOCK_KV, D>> K_lane{K_smem, lane_id / 16 * 8 + lane_id % 8,
                                                              lane_id / 8 % 2 * 8};
    const LaneRow<ENCODED, Tile<Element, BLOCK_KV, D>> V_lane{V_smem, lane_id % 16, lane_id / 16 * 8};

    float O_rmem[D / 8][4 * BANDS] = {};  // (16 BANDS, D): 8 columns at each [c]; sum of P V
    float m_rmem[2 * BANDS];       // (2 BANDS), of the lane's rows, the same in 4 lanes: a maximum, or one before
    float l_rmem[2 * BANDS] = {};  // (2 BANDS), running sum of P, of the lane's columns
    for (float& m : m_rmem) m = -INFINITY;

    // A positive scale waits for the power, unless LOG2_E times it is too large a number.
    const bool waits = params.scale > 0 && params.scale < 1e38f;
    const float scale = waits ? params.scale : 1, factor = LOG2_E * scale;

    // A query sees the keys up to its own number and `past` more, as far as there are any.
    const int past = params.causal ? N - M : N;
    const int first_visible = min(q_begin + 1 + past, N);                     // keys that the block's first row sees,
    const int last_visible = min(min(q_begin + BLOCK_Q, M) + past, N);        // its last row,
    const int warp_visible = min(q_begin + warp_row + BANDS * 16 + past, N);  // and the warp's last row
    const int kv_tiles = (max(last_visible, 0) + BLOCK_KV - 1) / BLOCK_KV;
    const int whole = max(first_visible, 0) / BLOCK_KV;  // tiles that every row sees all of
    int kv_tile = BACKWARD ? kv_tiles - 1 : 0;
    const int last_tile = kv_tiles - 1 - kv_tile;

    auto load = [&](auto& smem, int tile, const Element* matrix, int64_t stride, auto ragged) {
        const int begin = tile * BLOCK_KV;
        load_tile<Shape::THREADS, !ragged.value>(smem, matrix + begin * stride, stride, N - begin);
        cp_async_commit_group();
    };
    if (kv_tiles > 0) {
        load_tile<Shape::THREADS, false>(Q_smem, Q, q.row, M - q_begin);
        load(K_smem, kv_tile, K, k_row, std::true_type());
        cp_async_wait_group<0>();  // this thread's part of Q and K has landed
        __syncthreads();           // Q and K are whole before anyone reads them
    }

    uint32_t Q_rmem[KEEP_Q ? D / 16 : 1][BANDS][4];  // (16 BANDS, D): 16 columns at each [d], or those of one step
    auto load_q_fragments = [&](int d) {
#pragma unroll
        for (int t = 0; t < BANDS; ++t) ldmatrix_x4(Q_rmem[KEEP_Q ? d : 0][t], Q_lane.of(t * 16, d * 16));
    };
    if (KEEP_Q && kv_tiles > 0) {
#pragma unroll
        for (int d = 0; d < D / 16; ++d) load_q_fragments(d);
    }

    auto step = [&](auto masked) __attribute__((always_inline)) {
        const int kv_begin = kv_tile * BLOCK_KV;
        // A warp none of whose rows sees a key of the tile leaves the tensor cores to others.
        const bool seen = !masked.value || SKIP == Skip::never || kv_begin < warp_visible;
        auto load_next_k = [&] {
            cp_async_wait_group<0>();  // this thread's part of V has landed
            __syncthreads();           // V is whole before anyone reads it, and everyone is done with this K
            if (kv_tile != last_tile) load(K_smem, kv_tile + NEXT, K, k_row, std::bool_constant<!BACKWARD>());
        };
        load(V_smem, kv_tile, V, v_row, masked);

        float S_rmem[BLOCK_KV / 8][4 * BANDS];  // (16 BANDS, BLOCK_KV): 8 keys at each [j]
        auto clear = [&](int j) {
            for (float& s : S_rmem[j]) s = 0;
        };
        if (ZEROS == Zeros::tile) {
#pragma unroll
            for (int j = 0; j < BLOCK_KV / 8; ++j) clear(j);
        }
        if (seen) {
            // S = Q K^T, -inf where the query does not see the key. Rows of K are columns of K^T: as they lie.
#pragma unroll
            for (int d = 0; d < D / 16; ++d) {
                if (!KEEP_Q) load_q_fragments(d);
#pragma unroll
                for (int j = 0; j < BLOCK_KV / 16; ++j) {
                    uint32_t k[4];  // (16, 16) of K^T, two operands
                    ldmatrix_x4(k, K_lane.of(j * 16, d * 16));
                    if (ZEROS == Zeros::step && d == 0) clear(2 * j), clear(2 * j + 1);
#pragma unroll
                    for (int t = 0; t < BANDS; ++t) {
                        mma_m16n8k16<Element>(band(S_rmem[2 * j], t), Q_rmem[KEEP_Q ? d : 0][t], {k[0], k[1]});
                        mma_m16n8k16<Element>(band(S_rmem[2 * j + 1], t), Q_rmem[KEEP_Q ? d : 0][t], {k[2], k[3]});
                    }
                }
            }
            if (!waits) {
#pragma unroll
                for (int j = 0; j < BLOCK_KV / 8; ++j) {
#pragma unroll
                    for (float& s : S_rmem[j]) s *= params.scale;
                }
            }
            if (masked.value && (MASKS == Masks::apart || kv_begin + BLOCK_KV > first_visible)) {
#pragma unroll
                for (int i = 0; i < 4 * BANDS; ++i) {
                    const int row = q_begin + lane_row + i / 2 * 8;
                    const int visible = min(row + 1 + past, N) - kv_begin - lane_column;  // of the lane's columns
#pragma unroll
                    for (int j = 0; j < BLOCK_KV / 8; ++j) {
                        if (j * 8 + i % 2 >= visible) S_rmem[j][i] = -INFINITY;
                    }
                }
            }
        }
        if (EARLY) load_next_k();

        uint32_t P_rmem[BLOCK_KV / 16][BANDS][4];  // (16 BANDS, BLOCK_KV): 16 keys at each [j]; exp(s - m)
        if (seen) {
            // Online softmax: 4 lanes for each row, 2 rows of a band for each lane. P is relative to any number near
            // the maximum: the last one will do until the maximum is 2^GROWTH times as large a power.
            float m_new[2 * BANDS];
            bool grown = RESCALE == Rescale::always;
#pragma unroll
            for (int r = 0; r < 2 * BANDS; ++r) {
                m_new[r] = m_rmem[r];
#pragma unroll
                for (const float (&s)[4 * BANDS] : S_rmem) m_new[r] = fmaxf(m_new[r], fmaxf(s[2 * r], s[2 * r + 1]));
                m_new[r] = row_max(m_new[r]);
                grown |= (m_new[r] - m_rmem[r]) * factor > GROWTH;
            }
            if (__any_sync(flash::ALL_LANES, grown)) {
#pragma unroll
                for (int r = 0; r < 2 * BANDS; ++r) {
                    const Shift old = Shift::to(m_rmem[r], factor), shift = Shift::to(m_new[r], factor);
                    const float subtract = m_new[r] == -INFINITY ? 0 : shift.scaled;
                    const float rescale = ex2(fmaf(old.base - shift.base, factor, old.scaled - subtract));
                    m_rmem[r] = m_new[r];
                    l_rmem[r] *= rescale;
#pragma unroll
                    for (float (&o)[4 * BANDS] : O_rmem) o[2 * r] *= rescale, o[2 * r + 1] *= rescale;
                }
            }
            bool far = false;  // from 0, see Shift
#pragma unroll
            for (float m : m_rmem) far |= Shift::to(m, factor).base != 0;
            if (far) {
#pragma unroll
                for (float (&s)[4 * BANDS] : S_rmem) {
#pragma unroll
                    for (int i = 0; i < 4 * BANDS; ++i) s[i] -= Shift::to(m_rmem[i / 2], factor).base;
                }
            }
#pragma unroll
            for (int r = 0; r < 2 * BANDS; ++r) {
                // A row that has seen no key yet has m = -inf, and -inf - -inf is NaN: subtract 0, exp(-inf) is 0.
                const float subtract = m_rmem[r] == -INFINITY ? 0 : Shift::to(m_rmem[r], factor).scaled;
                float sum = 0;  // of the tile's first: l may be so large that it would round every single addend
#pragma unroll
                for (float (&s)[4 * BANDS] : S_rmem) {
#pragma unroll
                    for (int i = 2 * r; i < 2 * r + 2; ++i) {
                        s[i] = ex2(fmaf(s[i], factor, -subtract));
                        sum += s[i];
                    }
                }
                l_rmem[r] += sum;
            }
            // Two accumulators side by side are one operand: what a lane holds of S is what it has to hold of P.
#pragma unroll
            for (int j = 0; j < BLOCK_KV / 16; ++j) {
#pragma unroll
                for (int i = 0; i < 4 * BANDS; ++i) {
                    const float (&s)[4 * BANDS] = S_rmem[2 * j + i / 2 % 2];
                    P_rmem[j][i / 4][i % 4] = pack<Element>(s[i / 4 * 4 + i % 2 * 2], s[i / 4 * 4 + i % 2 * 2 + 1]);
                }
            }
        }
        if (!EARLY) load_next_k();

        if (seen) {
            // O += P V. Rows of V are rows of the product's second operand: transposed on the way.
#pragma unroll
            for (int j = 0; j < BLOCK_KV / 16; ++j) {
#pragma unroll
                for (int c = 0; c < D / 16; ++c) {
                    uint32_t v[4];  // (16, 16), two operands
                    ldmatrix_x4<true>(v, V_lane.of(j * 16, c * 16));
#pragma unroll
                    for (int t = 0; t < BANDS; ++t) {
                        mma_m16n8k16<Element>(band(O_rmem[2 * c], t), P_rmem[j][t], {v[0], v[1]});
                        mma_m16n8k16<Element>(band(O_rmem[2 * c + 1], t), P_rmem[j][t], {v[2], v[3]});
                    }
                }
            }
        }
        cp_async_wait_group<0>();  // this thread's part of the next K has landed
        __syncthreads();           // K is whole before anyone reads it, and everyone is done with V
    };
    constexpr bool ASKED = MASKS == Masks::asked;
    for (; BACKWARD ? kv_tile >= whole : kv_tile < whole; kv_tile += NEXT)
        step(std::bool_constant<ASKED || BACKWARD>());
    for (; BACKWARD ? kv_tile >= 0 : kv_tile < kv_tiles; kv_tile += NEXT)
        step(std::bool_constant<ASKED || !BACKWARD>());

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
            const int column = c * 8 + lane_column;
            const uint32_t o = pack<Element>(O_rmem[c][2 * r] * inverse, O_rmem[c][2 * r + 1] * inverse);
            Element* place = EPILOGUE == Epilogue::shared ? Q_smem.at(row, column) : &O[row * D + column];
            if (EPILOGUE == Epilogue::scalar) {
                reinterpret_cast<uint16_t*>(place)[0] = uint16_t(o);
                reinterpret_cast<uint16_t*>(place)[1] = uint16_t(o >> 16);
            } else {
                *reinterpret_cast<uint32_t*>(place) = o;
            }
        }
        const Shift shift = Shift::to(m_rmem[r], factor);
        const float lse = fmaf(shift.base, scale, shift.scaled * (1 / LOG2_E)) + logf(l_rmem[r]);
        if (lane_id % 4 == 0) params.lse[int64_t(head) * M + q_begin + row] = lse;
    }
    if (EPILOGUE == Epilogue::shared) {
        __syncwarp();  // the warp's rows of O, where nobody else's have been, are whole before it reads them
        constexpr int CHUNK = 16 / sizeof(Element);
#pragma unroll
        for (int i = 0; i < BANDS * 16 * D; i += WARP * CHUNK) {
            const int element = i + lane_id * CHUNK, row = warp_row + element / D, column = element % D;
            if (q_begin + row >= M) break;
            *reinterpret_cast<uint4*>(&O[row * D + column]) = *reinterpret_cast<const uint4*>(Q_smem.at(row, column));
        }
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
    if (suits(std::tuple_element_t<LARGE, Shapes<64>>())) return LARGE;
    return suits(std::tuple_element_t<MEDIUM, Shapes<64>>()) ? MEDIUM : SMALL;
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
                const bool fixed = ROWS == Rows::fixed && params.k_strides.row == D && params.v_strides.row == D;
                const auto kernel = fixed ? attention_kernel<Element, D, Shape, ROWS == Rows::fixed>
                                          : attention_kernel<Element, D, Shape, false>;
                flash::launch(kernel, dim3(blocks), dim3(Shape::THREADS), sizeof(Shared<Element, D, Shape>), stream,
                              params);
            };
            flash::dispatch_shape<Shapes<head_dim>, TILES>(TILES == -1 ? params.tiles : TILES, launch_shape);
        });
    });
}

}  // namespace

FLASH_REGISTER_TILED(launch, choose_tiles)
