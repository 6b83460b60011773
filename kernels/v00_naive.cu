// v00: naive attention, three kernels that meet in global memory.
//
// Idea        The textbook's three steps, S = scale Q K^T, P = softmax(S) and O = P V, are three kernels: a thread for
//             each entry of S, a warp for each row of P, a thread for each entry of O. S is written to global memory,
//             and P takes its place there.
// From        nothing: the ladder starts here.
// Bottleneck  Global memory. S has M x N entries: written once, then read three times and written twice by the softmax,
//             then read D times by P V. And for S neighbouring threads read neighbouring *rows* of K: one load of a
//             warp touches 32 sectors where 4 would do. Nothing is reused but what a cache happens to keep.
// Run         flash-tutorial run v00

#include "flash/launch.cuh"

namespace {

constexpr int WARP = 32;
constexpr int THREADS = 128;
constexpr int WARPS = THREADS / WARP;
constexpr unsigned ALL_LANES = 0xffffffff;
static_assert(THREADS % WARP == 0, "the softmax gives every warp a row of its own");

// A query sees the keys 0 ... visible_keys - 1: all of them, or under a causal mask those up to the diagonal that ends
// at the last query and the last key. The first queries see none if there are more queries than keys: zero, or less.
__device__ int visible_keys(const flash::Params& params, int query) {
    return params.causal ? query + params.keys - params.queries + 1 : params.keys;
}

__device__ float warp_max(float x) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, offset));
    return x;
}

__device__ float warp_sum(float x) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

// S[row, key] = scale * <Q[row], K[key]>, and -inf where the mask hides the key. One thread for each entry: a block has
// one row of S, neighbouring threads have neighbouring keys.
__global__ void __launch_bounds__(THREADS) scores_kernel(flash::Params params) {
    const int M = params.queries, N = params.keys, D = params.head_dim;
    const int key_blocks = (N + THREADS - 1) / THREADS;
    const int key = blockIdx.x % key_blocks * THREADS + threadIdx.x;
    const int row = blockIdx.x / key_blocks;  // of the batch * heads * M rows of S
    const int head = row / M, query = row % M;
    const int kv_head = head / (params.heads / params.kv_heads);
    const float* q = static_cast<const float*>(params.q) + int64_t(row) * D;                  // (D)
    const float* k = static_cast<const float*>(params.k) + (int64_t(kv_head) * N + key) * D;  // (D)
    float* S = static_cast<float*>(params.workspace) + int64_t(row) * N;                      // (N)

    if (key >= N) return;
    float dot = 0;
    for (int d = 0; d < D; ++d) dot += q[d] * k[d];
    S[key] = key < visible_keys(params, query) ? dot * params.scale : -INFINITY;
}

// P[row] = softmax(S[row]) in place, and lse[row]. One warp for each row: lanes stride along it.
__global__ void __launch_bounds__(THREADS) softmax_kernel(flash::Params params) {
    const int N = params.keys;
    const int warp_id = threadIdx.x / WARP, lane_id = threadIdx.x % WARP;
    const int row = blockIdx.x * WARPS + warp_id;
    float* S = static_cast<float*>(params.workspace) + int64_t(row) * N;  // (N)

    if (row >= params.batch * params.heads * params.queries) return;  // the whole warp leaves: its shuffles stay whole
    float m = -INFINITY;
    for (int key = lane_id; key < N; key += WARP) m = fmaxf(m, S[key]);
    m = warp_max(m);
    if (m == -INFINITY) m = 0;  // no key in sight: -inf - 0 keeps exp at 0, where -inf - -inf would make it NaN

    float l = 0;
    for (int key = lane_id; key < N; key += WARP) {
        const float p = expf(S[key] - m);  // the largest is exp(0): nothing overflows, however large the scores
        S[key] = p;
        l += p;
    }
    l = warp_sum(l);
    const float inverse = l == 0 ? 0 : 1 / l;  // an empty row becomes 0, not 0 / 0
    for (int key = lane_id; key < N; key += WARP) S[key] *= inverse;
    if (lane_id == 0) params.lse[row] = m + logf(l);  // log(0) = -inf is the empty row's
}

// O[row, column] = sum over the keys of P[row, key] V[key, column]. One thread for each entry of O.
__global__ void __launch_bounds__(THREADS) output_kernel(flash::Params params) {
    const int M = params.queries, N = params.keys, D = params.head_dim;
    const int64_t entry = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    const int row = entry / D, column = entry % D;
    const int head = row / M, query = row % M;
    const int kv_head = head / (params.heads / params.kv_heads);
    const float* P = static_cast<const float*>(params.workspace) + int64_t(row) * N;           // (N)
    const float* V = static_cast<const float*>(params.v) + int64_t(kv_head) * N * D + column;  // (N), D apart
    float* O = static_cast<float*>(params.out);                                                // (rows, D)

    if (row >= params.batch * params.heads * M) return;
    float sum = 0;
    const int visible = visible_keys(params, query);
    for (int key = 0; key < visible; ++key) sum += P[key] * V[int64_t(key) * D];
    O[entry] = sum;
}

void launch(const flash::Params& params, void* stream) {
    const int rows = params.batch * params.heads * params.queries;
    const int key_blocks = (params.keys + THREADS - 1) / THREADS;
    const int64_t entries = int64_t(rows) * params.head_dim;
    if (params.keys > 0) flash::launch(scores_kernel, dim3(rows * key_blocks), dim3(THREADS), 0, stream, params);
    flash::launch(softmax_kernel, dim3((rows + WARPS - 1) / WARPS), dim3(THREADS), 0, stream, params);
    flash::launch(output_kernel, dim3((entries + THREADS - 1) / THREADS), dim3(THREADS), 0, stream, params);
}

// S, then P: (batch, heads, M, N) floats.
size_t workspace_bytes(const flash::Params& params) {
    return sizeof(float) * params.batch * params.heads * params.queries * params.keys;
}

}  // namespace

FLASH_REGISTER_WITH_WORKSPACE(launch, workspace_bytes)
