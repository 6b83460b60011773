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

# v08 and v10: the scale waits for the power, scores far from 0 have a shift, sums are added up at the end.
SHIFTED = {
    "a scale of 0 or less waits, too": {"params.scale > 0 && params.scale < 1e38f": "params.scale < 1e38f"},
    "a scale that does not wait is dropped": {"if (!waits) {": "if (false) {"},
    "a rescale forgets large scores": {"fmaf(old.base - shift.base, factor,": "fmaf(0, factor,"},
    "a rescale forgets scores": {"old.scaled - subtract)": "old.scaled == -INFINITY ? -INFINITY : 0)"},
    "the sum is one lane's": {"l = row_sum(l);": ";"},
    "an empty row is divided by 0": {"l_rmem[r] == 0 ? 0 : ": ""},
}

# v09 on: strides, and causal blocks from the longest to the shortest.
STRIDED = {
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
    "tiles read past the last row": {"i < rows ? 16 : 0": "i <= rows ? 16 : 0"},
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
    | SHIFTED
    | {
        "the scale is dropped": {"factor = LOG * scale": "factor = LOG"},
        "an exponent of e is taken for one of 2": {"factor = LOG * scale": "factor = scale"},
        "the shift of large scores is rounded": {"fabsf(scaled) <= LARGEST_SHIFT || m == -INFINITY ?": "true ?"},
        "large scores have no shift": {
            "S_rmem[j][2 * r] -= shift.base;": "",
            "S_rmem[j][2 * r + 1] -= shift.base;": "",
        },
        "a row of -inf has no guard": {"m_new == -INFINITY ? 0 : shift.scaled": "shift.scaled"},
        "l is not rescaled": {"l_rmem[r] * rescale + sum": "l_rmem[r] + sum"},
        "O is not rescaled": {"O_rmem[c][2 * r] *= rescale;": "", "O_rmem[c][2 * r + 1] *= rescale;": ""},
        "the sum is added up twice": {"if (SUMS == Sums::tile) sum =": "sum ="},
        "the first tile comes twice": {"int kv_tile = PEEL;": "int kv_tile = 0;"},
        "the second tile is forgotten": {"int kv_tile = PEEL;": "int kv_tile = PEEL + 1;"},
        "a block that sees no key has a first tile": {"PEEL && kv_tiles > 0": "PEEL"},
        "lse is a logarithm to base 2": {"shift_rmem[r].scaled * (1 / LOG)": "shift_rmem[r].scaled"},
        "lse forgets large scores": {"fmaf(shift_rmem[r].base, scale,": "fmaf(0, scale,"},
    },
    "v09_adaptive_tiles": STRIDED
    | {
        "a causal block stops a tile early": TILED["a causal block stops a tile early"],
        "Q has K's rows": {"Q, q.row, M - q_begin": "Q, k.row, M - q_begin"},
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
    "v10_lean_instructions": STRIDED
    | SHIFTED
    | {
        # Blocks, heads and strides.
        "Q has K's rows": {"Q, q.row, M - q_begin": "Q, k_row, M - q_begin"},
        "the next K has V's rows": {"kv_tile + NEXT, K, k_row": "kv_tile + NEXT, K, v_row"},
        "all rows are taken for D apart": {"ROWS == Rows::fixed && params.k_strides.row == D &&": "true ||"},
        "V's rows are taken for D apart where K's are": {" && params.v_strides.row == D;": ";"},
        "K's rows are taken for D apart where V's are": {"params.k_strides.row == D && ": ""},
        # Tiles of keys and their order.
        "a causal block stops a tile early": {"min(min(q_begin + BLOCK_Q, M) + past, N)": "min(q_begin + past, N)"},
        "a causal block stops a row early": {
            "min(min(q_begin + BLOCK_Q, M) + past, N)": "min(min(q_begin + BLOCK_Q, M) - 1 + past, N)"
        },
        "the first tile is forgotten": {"BACKWARD ? kv_tile >= 0 :": "BACKWARD ? kv_tile > 0 :"},
        "the last tile is where it is forwards": {"kv_tiles - 1 - kv_tile;": "kv_tiles - 1;"},
        "a block that sees no key loads a tile": {"if (kv_tiles > 0) {": "if (true) {"},
        "a block far from any key has a tile": {"max(first_visible, 0) / BLOCK_KV;": "first_visible / BLOCK_KV;"},
        # Masks, in code of their own, and tiles that a warp skips.
        "all queries see as much as causal ones": {"params.causal ? N - M : N;": "N - M;"},
        "the mask is aligned to the top left": {"params.causal ? N - M : N;": "params.causal ? 0 : N;"},
        "a query sees one key too few": {"min(row + 1 + past, N)": "min(row + past, N)"},
        "a query sees one key too many": {"min(row + 1 + past, N)": "min(row + 2 + past, N)"},
        "a tile that the first row sees in part is whole": {
            "max(first_visible, 0) / BLOCK_KV;": "(max(first_visible, 0) + BLOCK_KV - 1) / BLOCK_KV;"
        },
        "a tile is whole where the last row sees all of it": {
            "min(q_begin + 1 + past, N);": "min(min(q_begin + BLOCK_Q, M) + past, N);"
        },
        "a tile of which the first row misses one key is whole": {"min(q_begin + 1 + past": "min(q_begin + 2 + past"},
        "masked tiles have the code of others": {
            "step(std::bool_constant<ASKED || BACKWARD>())": "step(std::bool_constant<ASKED>())"
        },
        "hidden scores are a very negative number": {"S_rmem[j][i] = -INFINITY": "S_rmem[j][i] = -1e9f"},
        "the lower 8 rows are masked like the upper": {"lane_row + i / 2 * 8;": "lane_row + i / 4 * 16;"},
        "odd columns are masked like even ones": {"j * 8 + i % 2 >= visible": "j * 8 >= visible"},
        "a warp skips a tile that its last row sees one key of": {
            "min(q_begin + warp_row + BANDS * 16 + past, N);": "min(q_begin + warp_row + BANDS * 16 - 1 + past, N);"
        },
        "all warps skip what the first one does not see": {"q_begin + warp_row + BANDS": "q_begin + BANDS"},
        "a warp that skips a tile copies no K": {
            "if (EARLY) load_next_k();": "if (EARLY && seen) load_next_k();",
            "if (!EARLY) load_next_k();": "if (!EARLY && seen) load_next_k();",
        },
        "a warp that skips a tile is out of step": {
            "load(V_smem, kv_tile, V, v_row, masked);": "load(V_smem, kv_tile, V, v_row, masked);\n"
            "        if (!seen) return;"
        },
        # Copies.
        "all of Q's rows are there": {
            "load_tile<Shape::THREADS, false>(Q_smem": "load_tile<Shape::THREADS, true>(Q_smem"
        },
        "a ragged tile of K is taken for a whole one": {
            "load(K_smem, kv_tile, K, k_row, std::true_type());": "load(K_smem, kv_tile, K, k_row, std::false_type());"
        },
        "a ragged tile of V is taken for a whole one": {
            "load(V_smem, kv_tile, V, v_row, masked);": "load(V_smem, kv_tile, V, v_row, std::false_type());"
        },
        "no wait for Q and K": no_barrier("this thread's part of Q and K", "cp_async_wait_group<0>()"),
        "no wait for the next K": no_barrier("this thread's part of the next K", "cp_async_wait_group<0>()"),
        "no wait for V": no_barrier("this thread's part of V", "cp_async_wait_group<0>()"),
        "no barrier after Q and K are loaded": no_barrier("Q and K are whole", spaces=11),
        "no barrier after the next K is loaded": no_barrier("K is whole", spaces=11),
        "no barrier after V is loaded": no_barrier("V is whole", spaces=11),
        "the next K overwrites one that is in use": {
            "auto load_next_k = [&] {": "auto load_next_k = [&] {\n"
            "            if (kv_tile != last_tile) load(K_smem, kv_tile + NEXT, K, k_row, std::true_type());",
            "if (kv_tile != last_tile) load(K_smem, kv_tile + NEXT, K, k_row, std::bool_constant<!BACKWARD>());": "",
        },
        # Products.
        "S begins with zeros in the second step": {"ZEROS == Zeros::step && d == 0": "ZEROS == Zeros::step && d == 1"},
        "K's matrices lie like V's": {"lane_id / 16 * 8 + lane_id % 8,": "lane_id / 8 % 2 * 8 + lane_id % 8,"},
        "V is not transposed": {"ldmatrix_x4<true>(": "ldmatrix_x4("},
        "both bands have the first one's Q": tiles(2) | {"Q_lane.of(t * 16, d * 16)": "Q_lane.of(0, d * 16)"},
        "both bands have the first one's P": tiles(2)
        | {"band(O_rmem[2 * c], t), P_rmem[j][t]": "band(O_rmem[2 * c], t), P_rmem[j][0]"},
        "both bands are masked like the first": tiles(2) | {"lane_row + i / 2 * 8;": "lane_row + i / 2 % 2 * 8;"},
        "warps share bands": tiles(2) | {"warp_id * BANDS * 16": "warp_id * 16"},
        # The softmax.
        "the scale is dropped": {"factor = LOG2_E * scale": "factor = LOG2_E"},
        "an exponent of e is taken for one of 2": {"factor = LOG2_E * scale": "factor = scale"},
        "the maximum is one lane's": {"m_new[r] = row_max(m_new[r]);": ""},
        "the maximum forgets earlier tiles": {"m_new[r] = m_rmem[r];": "m_new[r] = -INFINITY;"},
        "the maximum starts from a number": {"m_rmem) m = -INFINITY;": "m_rmem) m = -1e30f;"},
        "the first maximum stays": {
            "grown |= (m_new[r] - m_rmem[r]) * factor > GROWTH": "grown |= m_rmem[r] == -INFINITY"
        },
        "a maximum may grow by more than P can hold": {"GROWTH = 8;": "GROWTH = 20;"},
        "growth is measured in scores": {"(m_new[r] - m_rmem[r]) * factor > GROWTH": "m_new[r] - m_rmem[r] > GROWTH"},
        "growth is what a maximum falls by": {"(m_new[r] - m_rmem[r]) * factor": "(m_rmem[r] - m_new[r]) * factor"},
        "only the last row's growth counts": {"grown |= (m_new": "grown = (m_new"},
        "a warp rescales where all of its rows have grown": {"__any_sync(": "__all_sync("},
        "P is relative to a maximum that O is not": {
            "subtract = m_rmem[r] == -INFINITY ? 0 : Shift::to(m_rmem[r], factor).scaled;": (
                "subtract = m_new[r] == -INFINITY ? 0 : Shift::to(m_new[r], factor).scaled;"
            )
        },
        "the maximum is not replaced": {"m_rmem[r] = m_new[r];": ""},
        "l is not rescaled": {"l_rmem[r] *= rescale;": ""},
        "l adds up single weights": {"sum += s[i];": "l_rmem[r] += s[i];"},
        "O is not rescaled": {"o[2 * r] *= rescale, o[2 * r + 1] *= rescale;": ";"},
        "the second band's rows are not rescaled": tiles(2)
        | {"o[2 * r] *= rescale, ": "o[2 * r] *= r < 2 ? rescale : 1, "},
        "a rescale of a row of -inf has no guard": {"m_new[r] == -INFINITY ? 0 : shift.scaled": "shift.scaled"},
        "a row of -inf has no guard": {"m_rmem[r] == -INFINITY ? 0 : Shift": "Shift"},
        "large scores have no shift": {"if (far) {": "if (false) {"},
        "only the last row is far from 0": {"far |= Shift": "far = Shift"},
        "the shift is the first row's": {"Shift::to(m_rmem[i / 2], factor).base": "Shift::to(m_rmem[0], factor).base"},
        # What is stored.
        "the final division is left out": {"l_rmem[r] == 0 ? 0 : 1 / l_rmem[r]": "l_rmem[r] == 0 ? 0 : 1"},
        "lse is a logarithm to base 2": {"shift.scaled * (1 / LOG2_E)": "shift.scaled"},
        "lse forgets large scores": {"fmaf(shift.base, scale,": "fmaf(0, scale,"},
        "no warp barrier between O and its readers": no_barrier("the warp's rows of O", "__syncwarp()"),
        "O's chunks are where they would be without a swizzle": {
            "? Q_smem.at(row, column) : &O": "? &Q_smem.elements[row][column] : &O"
        },
        "O's last chunks are forgotten": {"i < BANDS * 16 * D;": "i < BANDS * 16 * D - WARP * CHUNK;"},
        "every warp stores the first one's O": {"row = warp_row + element / D,": "row = element / D,"},
        "O is stored past its last row": {
            "column = element % D;\n            if (q_begin + row >= M) break;": "column = element % D;"
        },
        "the last row is not written": {
            "r * 8;\n        if (q_begin + row >= M) break;": "r * 8;\n        if (q_begin + row >= M - 1) break;"
        },
    },
}
