"""Mistakes, each of which the suite has to catch in a copy of a kernel: version → mistake → {old text: new text}.

They are the mistakes that people make: a barrier forgotten, an edge off by one, a factor dropped. None of them is
harmless: a kernel with one gives a wrong number, or a right one by luck, for some input that the contract allows.
"""

from __future__ import annotations


def no_barrier(reason: str, barrier: str = "__syncthreads()", spaces: int = 2) -> dict[str, str]:
    """The barrier, or wait, whose comment begins with `reason`, `spaces` after it, is gone."""
    return {f"{barrier};{' ' * spaces}// {reason}": f"// {reason}"}


def tiles(number: int) -> dict[str, str]:
    """The kernel takes this one of its tile shapes: small problems do not choose the large ones themselves."""
    return {"constexpr int TILES = -1;": f"constexpr int TILES = {number};"}


KV_HEAD = "head / (params.heads / params.kv_heads)"

# What v01 to v05 have in common word for word.
FUSED = {
    "the K/V head is the query head": {KV_HEAD: "head % params.kv_heads"},
    "K and V are the first batch's": {KV_HEAD: "head % params.heads / (params.heads / params.kv_heads)"},
    "the mask is aligned to the top left": {"+ N - M + 1, N) : N;": "+ 1, N) : N;"},
    "a query sees one key too few": {"+ N - M + 1, N) : N;": "+ N - M, N) : N;"},
    "a query sees one key too many": {"+ N - M + 1, N) : N;": "+ N - M + 2, N) : N;"},
    "zeros past the last key count": {"+ N - M + 1, N) : N;": "+ N - M + 1, N) : N + 1;"},
    "a row of -inf has no guard": {"m_new == -INFINITY ? 0 : m_new": "m_new"},
    "the maximum is not subtracted": {
        "const float subtract = m_new == -INFINITY ? 0 : m_new": "const float subtract = 0"
    },
    "tiles read past the last row": {"row < rows ?": "row <= rows ?"},
}

# v01 to v03.
SCALAR = {
    "the scale is dropped": {" * params.scale : -INFINITY": " : -INFINITY"},
    "hidden scores are a very negative number": {" * params.scale : -INFINITY": " * params.scale : -1e9f"},
    "V comes from the tile before": {"V, kv_begin, N": "V, max(kv_begin - BLOCK_KV, 0), N"},
}

# v01 and v02: scores and P in shared memory.
SHARED = {
    "the scale comes after the mask": {
        "= kv_begin + key < visible ?": "= (kv_begin + key < visible ?",
        "dot * params.scale : -INFINITY": "dot : -INFINITY) * params.scale",
    },
    "no barrier after the tiles are loaded": no_barrier("the tiles are whole"),
    "no barrier before the softmax": no_barrier("S is whole"),
    "no barrier after the softmax": no_barrier("P and rescale are whole"),
    "no barrier before the next tiles": no_barrier("everyone is done with the tiles"),
    "O is not rescaled": {" * rescale_smem[row]": ""},
    "the maximum forgets earlier tiles": {"float m_new = m_old;": "float m_new = -INFINITY;"},
    "an empty row is divided by 0": {"sum == 0 ? 0 : ": ""},
    "the last row is not written": {"if (q_begin + row >= M) break;": "if (q_begin + row >= M - 1) break;"},
}

# v02 on: one block for each Q tile.
TILED = {
    "a causal block stops a tile early": {"min(min(q_begin + BLOCK_Q, M) + N - M, N)": "min(q_begin + N - M, N)"},
    "Q tiles overlap by a row": {"blockIdx.x % q_tiles * BLOCK_Q": "blockIdx.x % q_tiles * (BLOCK_Q - 1)"},
}

# v03 on: K and V share a buffer, rows belong to a warp.
WARP_LOCAL = {
    "no barrier after K is loaded": no_barrier("K (at first Q too) is whole"),
    "no barrier before V overwrites K": no_barrier("every warp is done with K"),
    "no barrier after V is loaded": no_barrier("V is whole"),
    "no barrier before K overwrites V": no_barrier("every warp is done with V"),
    "no warp barrier between P and its readers": no_barrier("P is whole", "__syncwarp()"),
    "the maximum starts from a number": {"m_rmem[r] = -INFINITY": "m_rmem[r] = -1e30f"},
    "a row of NaN is taken for an empty one": {"l_rmem[r] == 0 ?": "m_rmem[r] == -INFINITY ?"},
    "lse lacks the maximum": {"m_rmem[r] + logf(": "logf("},
}

# v05 on: products of fragments.
FRAGMENTS = {
    "the scale is dropped": {"S_rmem[j][i] *= params.scale": "S_rmem[j][i] *= 1"},
    "hidden scores are a very negative number": {"S_rmem[j][i] = -INFINITY": "S_rmem[j][i] = -1e9f"},
    "a tile on the diagonal is not masked": {"q_begin + 1 + N - M": "q_begin + BLOCK_Q + N - M"},
    "the lower 8 rows are masked like the upper": {"q_begin + lane_row + i / 2 * 8;": "q_begin + lane_row;"},
    "odd columns are masked like even ones": {"lane_column + i % 2 >= visible": "lane_column >= visible"},
    "K's second operand is its first": {"{K_rmem[j][2], K_rmem[j][3]}": "{K_rmem[j][0], K_rmem[j][1]}"},
    "V is not transposed": {"ldmatrix_x4<true>(": "ldmatrix_x4("},
    "P's neighbours are swapped": {
        "pack<Element>(S_rmem[2 * j + i / 2][i % 2 * 2], S_rmem[2 * j + i / 2][i % 2 * 2 + 1])": (
            "pack<Element>(S_rmem[2 * j + i / 2][i % 2 * 2 + 1], S_rmem[2 * j + i / 2][i % 2 * 2])"
        )
    },
    "P's quarters are in S's order": {
        "pack<Element>(S_rmem[2 * j + i / 2][i % 2 * 2], S_rmem[2 * j + i / 2][i % 2 * 2 + 1])": (
            "pack<Element>(S_rmem[2 * j + i % 2][i / 2 * 2], S_rmem[2 * j + i % 2][i / 2 * 2 + 1])"
        )
    },
    "O is not rescaled": {"O_rmem[c][2 * r] *= rescale;": "", "O_rmem[c][2 * r + 1] *= rescale;": ""},
    "the maximum starts from a number": {"{-INFINITY, -INFINITY}": "{-1e30f, -1e30f}"},
    "the maximum forgets earlier tiles": {"float m_new = m_rmem[r];": "float m_new = -INFINITY;"},
    "the maximum is one lane's": {"m_new = over_row(Maximum{}, m_new, parts);": ""},
    "the final division is left out": {"l_rmem[r] == 0 ? 0 : 1 / l_rmem[r]": "l_rmem[r] == 0 ? 0 : 1"},
    "an empty row is divided by 0": {"l_rmem[r] == 0 ? 0 : ": ""},
    "the last row is not written": {"if (q_begin + row >= M) break;": "if (q_begin + row >= M - 1) break;"},
    "lse lacks the maximum": {"m_rmem[r] + logf(": "logf("},
    "tiles read past the last row": {"global, row < rows ?": "global, row <= rows ?"},
}

# v05 and v06: one stage, nothing overlaps.
ONE_STAGE = {
    "V comes from the first tile": {"V + int64_t(kv_begin) * D": "V"},
    "no wait for Q": no_barrier("this thread's part of Q", "cp_async_wait_all()"),
    "no wait for K": no_barrier("this thread's part of K", "cp_async_wait_all()"),
    "no wait for V": no_barrier("this thread's part of V", "cp_async_wait_all()"),
    "no barrier after Q is loaded": no_barrier("Q is whole", spaces=6),
    "no barrier after K is loaded": no_barrier("K is whole", spaces=6),
    "no barrier after V is loaded": no_barrier("V is whole", spaces=6),
    "l is not rescaled": {"l_rmem[r] * rescale + over_row": "l_rmem[r] + over_row"},
    "the sum is one lane's": {"over_row(Sum{}, sum, parts)": "sum"},
}

MUTATIONS: dict[str, dict[str, dict[str, str]]] = {
    "v00_naive": {
        "the scale is dropped": {"dot * params.scale": "dot"},
        "hidden scores are a very negative number": {"dot * params.scale : -INFINITY": "dot * params.scale : -1e9f"},
        "the mask is aligned to the top left": {"query + params.keys - params.queries + 1": "query + 1"},
        "a query sees one key too few": {"params.keys - params.queries + 1": "params.keys - params.queries"},
        "a query sees one key too many": {"key < visible_keys(params, query)": "key <= visible_keys(params, query)"},
        "the K head is the query head": {
            f"{KV_HEAD};\n    const float* q": "head % params.kv_heads;\n    const float* q"
        },
        "the V head is the query head": {
            f"{KV_HEAD};\n    const float* P": "head % params.kv_heads;\n    const float* P"
        },
        "the maximum is not subtracted": {"expf(S[key] - m)": "expf(S[key])"},
        "the maximum starts from a number": {"float m = -INFINITY": "float m = -1e30f"},
        "a row of -inf has no guard": {"if (m == -INFINITY) m = 0;": ""},
        "the maximum is one lane's": {"m = warp_max(m);": ""},
        "the sum is one lane's": {"l = warp_sum(l);": ""},
        "the final division is left out": {"S[key] *= inverse": "S[key] *= l == 0 ? 0 : 1"},
        "an empty row is divided by 0": {"l == 0 ? 0 : 1 / l": "1 / l"},
        "lse lacks the maximum": {"m + logf(l)": "logf(l)"},
        "the maximum misses the last key": {"key < N; key += WARP) m =": "key < N - 1; key += WARP) m ="},
        "scores are written past the last key": {"if (key >= N) return;": "if (key > N) return;"},
    },
    "v01_fa1": FUSED
    | SCALAR
    | SHARED
    | {
        "no barrier after O, m and l are set": no_barrier("O, m and l are set"),
        "the maximum starts from a number": {"m[query] = -INFINITY": "m[query] = -1e30f"},
        "a row of NaN is taken for an empty one": {"sum == 0 ? 0 :": "m[i / D] == -INFINITY ? 0 :"},
        "l is not rescaled": {"l[query] * rescale + sum": "l[query] + sum"},
        "a causal K/V tile skips its first queries": {"max(kv_begin + M - N, 0)": "max(kv_begin + M - N + BLOCK_Q, 0)"},
        "the final division is left out": {"O[i] / sum": "O[i]"},
        "lse lacks the maximum": {"m[query] + logf(": "logf("},
    },
    "v02_fa2": FUSED
    | SCALAR
    | SHARED
    | TILED
    | {
        "no barrier after the state is set": no_barrier("Q and the state are set"),
        "the maximum starts from a number": {"m_smem[threadIdx.x] = -INFINITY": "m_smem[threadIdx.x] = -1e30f"},
        "a row of NaN is taken for an empty one": {"sum == 0 ? 0 :": "m_smem[row] == -INFINITY ? 0 :"},
        "l is not rescaled": {"l_smem[threadIdx.x] * rescale + sum": "l_smem[threadIdx.x] + sum"},
        "the final division is left out": {"O_smem[row][column] / sum": "O_smem[row][column]"},
        "lse lacks the maximum": {"m_smem[threadIdx.x] + logf(": "logf("},
    },
    "v03_warp_local": FUSED
    | SCALAR
    | TILED
    | WARP_LOCAL
    | {
        "the scale comes after the mask": {
            "= kv_begin + lane_id < visible ? S_rmem": "= (kv_begin + lane_id < visible ? S_rmem",
            " * params.scale : -INFINITY;": " : -INFINITY) * params.scale;",
        },
        "O is not rescaled": {"O_rmem[r][c] *= rescale;": ""},
        "l is not rescaled": {"l_rmem[r] * rescale + row_sum(p)": "l_rmem[r] + row_sum(p)"},
        "the sum is one lane's": {"row_sum(p)": "p"},
        "the maximum is one lane's": {"row_max(s)": "s"},
        "the maximum forgets earlier tiles": {"fmaxf(m_rmem[r], row_max(s))": "row_max(s)"},
        "the final division is left out": {"O_rmem[r][c] / l_rmem[r]": "O_rmem[r][c]"},
        "an empty row is divided by 0": {"l_rmem[r] == 0 ? 0 : ": ""},
        "the last row is not written": {"if (query >= M) break;": "if (query >= M - 1) break;"},
    },
    "v04_vectorized": FUSED
    | TILED
    | WARP_LOCAL
    | {
        "tiles read past the last row": {"row < rows ? load4": "row <= rows ? load4"},
        "the scale is dropped": {"S_rmem[r][j] *= params.scale": "S_rmem[r][j] *= 1"},
        "V comes from the first tile": {"V + int64_t(kv_begin) * D": "V"},
        "hidden scores are a very negative number": {"S_rmem[r][j] = -INFINITY": "S_rmem[r][j] = -1e9f"},
        "a tile on the diagonal is not masked": {"q_begin + 1 + N - M": "q_begin + BLOCK_Q + N - M"},
        "O is not rescaled": {"scaled(rescale, O_rmem[r][c])": "O_rmem[r][c]"},
        "l is not rescaled": {"l_rmem[r] * rescale + row_sum(sum)": "l_rmem[r] + row_sum(sum)"},
        "the sum is one lane's": {"row_sum(sum)": "sum"},
        "the maximum is one lane's": {"m_new = row_max(m_new);": ""},
        "the maximum forgets earlier tiles": {"float m_new = m_rmem[r];": "float m_new = -INFINITY;"},
        "the final division is left out": {"scaled(1 / l_rmem[r], O_rmem[r][c])": "O_rmem[r][c]"},
        "an empty row is divided by 0": {"l_rmem[r] == 0 ? float4{0, 0, 0, 0} : ": ""},
        "the last row is not written": {"if (q_begin + row >= M) break;": "if (q_begin + row >= M - 1) break;"},
    },
    "v05_tensor_core": FUSED | TILED | FRAGMENTS | ONE_STAGE,
    "v06_swizzled": TILED
    | ONE_STAGE
    | {"two chunks have one place": {"flash::swizzle<D>(row, column)": "(flash::swizzle<D>(row, column) | 8)"}},
    "v07_double_buffered": TILED
    | {
        "a wait leaves a group too many in flight": {"eager ? 2 * (STAGES - 1) :": "eager ? 2 * (STAGES - 1) + 1 :"},
        "no wait for Q": no_barrier(
            "this thread's part of Q", "cp_async_wait_group<LOADS == Loads::eager ? PENDING + 1 : 0>()"
        ),
        "no wait for K": no_barrier("this thread's part of K", "cp_async_wait_group<PENDING>()"),
        "no wait for V": no_barrier("this thread's part of V", "cp_async_wait_group<PENDING>()"),
        "no barrier after Q is loaded": no_barrier("Q is whole", spaces=49),
        "no barrier after K is loaded": no_barrier("K is whole", spaces=17),
        "no barrier after V is loaded": no_barrier("V is whole", spaces=17),
        "the next K overwrites one that is in use": {"load_k(kv_tile + STAGES);": "load_k(kv_tile + STAGES - 1);"},
        "the next V comes a tile late": {"load_v(kv_tile + STAGES - 1);": "load_v(kv_tile + STAGES);"},
        "K is the other stage's": {"K_smem[kv_tile % STAGES].at": "K_smem[(kv_tile + 1) % STAGES].at"},
        "V is the other stage's": {"V_smem[kv_tile % STAGES].at": "V_smem[(kv_tile + 1) % STAGES].at"},
        "tiles that do not exist have no groups": {
            "if (tile < kv_tiles) load_tile(K_smem": "if (tile >= kv_tiles) return;\n        load_tile(K_smem"
        },
        "a step's K is the step's before": {
            "k)[4] = K_rmem[d % (AHEAD + 1)][j]": "k)[4] = K_rmem[(d + 1) % (AHEAD + 1)][j]"
        },
        "a step's V is the step's before": {
            "v)[4] = V_rmem[j % (AHEAD + 1)][c]": "v)[4] = V_rmem[(j + 1) % (AHEAD + 1)][c]"
        },
        "the fragments of the first step are not loaded": {"int d = -AHEAD;": "int d = 0;"},
    },
    "v08_fused_softmax": TILED
    | {
        "the scale is dropped": {"factor = LOG * scale": "factor = LOG"},
        "an exponent of e is taken for one of 2": {"factor = LOG * scale": "factor = scale"},
        "a scale of 0 or less waits, too": {"params.scale > 0 && params.scale < 1e38f": "params.scale < 1e38f"},
        "a scale that does not wait is dropped": {"if (!waits) {": "if (false) {"},
        "the shift of large scores is rounded": {"fabsf(scaled) <= LARGEST_SHIFT || m == -INFINITY ?": "true ?"},
        "large scores have no shift": {
            "S_rmem[j][2 * r] -= shift.base;": "",
            "S_rmem[j][2 * r + 1] -= shift.base;": "",
        },
        "a row of -inf has no guard": {"m_new == -INFINITY ? 0 : shift.scaled": "shift.scaled"},
        "a rescale forgets large scores": {"fmaf(old.base - shift.base, factor,": "fmaf(0, factor,"},
        "a rescale forgets scores": {"old.scaled - subtract)": "old.scaled == -INFINITY ? -INFINITY : 0)"},
        "l is not rescaled": {"l_rmem[r] * rescale + sum": "l_rmem[r] + sum"},
        "O is not rescaled": {"O_rmem[c][2 * r] *= rescale;": "", "O_rmem[c][2 * r + 1] *= rescale;": ""},
        "the sum is one lane's": {"l = row_sum(l);": ";"},
        "the sum is added up twice": {"if (SUMS == Sums::tile) sum =": "sum ="},
        "the first tile comes twice": {"int kv_tile = PEEL;": "int kv_tile = 0;"},
        "the second tile is forgotten": {"int kv_tile = PEEL;": "int kv_tile = PEEL + 1;"},
        "a block that sees no key has a first tile": {"PEEL && kv_tiles > 0": "PEEL"},
        "lse is a logarithm to base 2": {"shift_rmem[r].scaled * (1 / LOG)": "shift_rmem[r].scaled"},
        "lse forgets large scores": {"fmaf(shift_rmem[r].base, scale,": "fmaf(0, scale,"},
        "an empty row is divided by 0": {"l_rmem[r] == 0 ? 0 : ": ""},
    },
    "v09_adaptive_tiles": {
        "a causal block stops a tile early": TILED["a causal block stops a tile early"],
        "Q tiles overlap by a row": {"q_tile * BLOCK_Q;": "q_tile * (BLOCK_Q - 1);"},
        "causal blocks take heads for tiles": {
            "params.causal ? blockIdx.x % heads": "params.causal ? blockIdx.x / q_tiles"
        },
        "the last tile of causal blocks is forgotten": {
            "q_tiles - 1 - blockIdx.x / heads": "max(q_tiles - 2 - static_cast<int>(blockIdx.x) / heads, 0)"
        },
        "the K/V head is the query head": {"q_head / (params.heads / params.kv_heads)": "q_head % params.kv_heads"},
        "K's batches are taken for contiguous": {"batch * k.batch": "batch * params.kv_heads * N * D"},
        "V's heads are taken for contiguous": {"kv_head * v.head": "kv_head * N * D"},
        "Q's tiles are taken for contiguous": {"q_begin * q.row": "q_begin * D"},
        "Q has K's rows": {"Q, q.row, M - q_begin": "Q, k.row, M - q_begin"},
        "tiles read past the last row": {"i < rows ? 16 : 0": "i <= rows ? 16 : 0"},
        "no wait for Q": no_barrier("this thread's part of Q", "cp_async_wait_group<PENDING + 1>()"),
        "no wait for K": no_barrier("this thread's part of K", "cp_async_wait_group<PENDING>()"),
        "no wait for V": no_barrier("this thread's part of V", "cp_async_wait_group<PENDING>()"),
        "no barrier after Q is loaded": no_barrier("Q is whole", spaces=21),
        "no barrier after K is loaded": no_barrier("K is whole", spaces=17),
        "no barrier after V is loaded": no_barrier("V is whole", spaces=17),
        "one stage's waits leave a group in flight": tiles(3)
        | {"PENDING = 2 * (STAGES - 1)": "PENDING = 2 * STAGES - 1"},
        "both bands have the first one's Q": tiles(5)
        | {"beside(q_offset, t * 16, d * 16)": "beside(q_offset, 0, d * 16)"},
        "both bands have the first one's P": tiles(5)
        | {"band(O_rmem[2 * c], t), P_rmem[j][t]": "band(O_rmem[2 * c], t), P_rmem[j][0]"},
        "both bands are masked like the first": tiles(5) | {"lane_row + i / 2 * 8;": "lane_row + i / 2 % 2 * 8;"},
        "warps share bands": tiles(5) | {"warp_id * BANDS * 16": "warp_id * 16"},
        "the second band's rows are not rescaled": tiles(5)
        | {"O_rmem[c][2 * r] *= rescale;": "O_rmem[c][2 * r] *= r < 2 ? rescale : 1;"},
    },
}
