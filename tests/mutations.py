"""Mistakes, each of which the suite has to catch in a copy of a kernel: version → mistake → {old text: new text}.

They are the mistakes that people make: a barrier forgotten, an edge off by one, a factor dropped. None of them is
harmless: a kernel with one gives a wrong number, or a right one by luck, for some input that the contract allows.
"""

from __future__ import annotations


def no_barrier(reason: str, barrier: str = "__syncthreads()") -> dict[str, str]:
    """The barrier whose comment begins with `reason` is gone."""
    return {f"{barrier};  // {reason}": f"// {reason}"}


KV_HEAD = "head / (params.heads / params.kv_heads)"

# What v01 to v04 share, word for word: their online softmax.
ONLINE = {
    "the scale is dropped": {" * params.scale : -INFINITY": " : -INFINITY"},
    "a row of -inf has no guard": {"m_new == -INFINITY ? 0 : m_new": "m_new"},
    "the K/V head is the query head": {KV_HEAD: "head % params.kv_heads"},
}

# v02 on: one block for each Q tile.
TILED = {
    "a causal block stops a row early": {"min(min(q_begin + BLOCK_Q, M) + N - M, N)": "min(q_begin + N - M, N)"},
    "the Q tile's first row is another block's": {
        "blockIdx.x % q_tiles * BLOCK_Q": "blockIdx.x % q_tiles * (BLOCK_Q - 1)"
    },
    "the mask is aligned to the top left": {"+ N - M + 1, N) : N;": "+ 1, N) : N;"},
    "a query sees one key too few": {"+ N - M + 1, N) : N;": "+ N - M, N) : N;"},
    "a query sees one key too many": {"+ N - M + 1, N) : N;": "+ N - M + 2, N) : N;"},
    "zeros past the last key count": {"+ N - M + 1, N) : N;": "+ N - M + 1, N) : N + 1;"},
    "V comes from the tile before": {"V, kv_begin, N": "V, max(kv_begin - BLOCK_KV, 0), N"},
    "tiles read past the last row": {"begin + row < rows ?": "begin + row <= rows ?"},
}

MUTATIONS: dict[str, dict[str, dict[str, str]]] = {
    "v00_naive": {
        "the scale is dropped": {"dot * params.scale": "dot"},
        "the scale is applied twice": {"dot * params.scale": "dot * params.scale * params.scale"},
        "the mask is aligned to the top left": {"query + params.keys - params.queries + 1": "query + 1"},
        "a query sees one key too few": {
            "query + params.keys - params.queries + 1": "query + params.keys - params.queries"
        },
        "a query sees one key too many": {"key < visible_keys(params, query)": "key <= visible_keys(params, query)"},
        "the K head is the query head": {
            f"{KV_HEAD};\n    const float* q": "head % params.kv_heads;\n    const float* q"
        },
        "the V head is the query head": {
            f"{KV_HEAD};\n    const float* P": "head % params.kv_heads;\n    const float* P"
        },
        "the maximum is not subtracted": {"expf(S[key] - m)": "expf(S[key])"},
        "a row of -inf has no guard": {"if (m == -INFINITY) m = 0;": ""},
        "the maximum is one lane's": {"m = warp_max(m);": ""},
        "the sum is one lane's": {"l = warp_sum(l);": ""},
        "the final division is left out": {"S[key] *= inverse": "S[key] *= l == 0 ? 0 : 1"},
        "an empty row is divided by 0": {"l == 0 ? 0 : 1 / l": "1 / l"},
        "lse lacks the maximum": {"m + logf(l)": "logf(l)"},
        "the last lanes' keys are left out": {"key < N; key += WARP) m =": "key < N - 1; key += WARP) m ="},
        "scores are written past the last key": {"if (key >= N) return;": "if (key > N) return;"},
    },
    "v01_fa1": ONLINE
    | {
        "no barrier after O, m and l are initialised": no_barrier("O, m and l are there"),
        "no barrier after the tiles are loaded": no_barrier("the Q, K and V tiles have arrived"),
        "no barrier before the softmax": no_barrier("rows of S are whole"),
        "no barrier after the softmax": no_barrier("P and rescale are there"),
        "no barrier before the next tiles": no_barrier("everyone is done with the tiles"),
        "O is not rescaled": {"*o * rescale_smem[row]": "*o"},
        "l is not rescaled": {"l[query] * rescale + sum": "l[query] + sum"},
        "the maximum forgets earlier tiles": {"float m_new = m_old;": "float m_new = -INFINITY;"},
        "the final division is left out": {"O[i] / l[i / D]": "O[i]"},
        "lse lacks the maximum": {"m[i] + logf(l[i])": "logf(l[i])"},
        "the mask is aligned to the top left": {"q_begin + row + N - M + 1": "q_begin + row + 1"},
        "a query sees one key too few": {"q_begin + row + N - M + 1": "q_begin + row + N - M"},
        "a query sees one key too many": {"q_begin + row + N - M + 1": "q_begin + row + N - M + 2"},
        "zeros past the last key count": {
            "kv_begin + column < min(visible, N)": "kv_begin + column <= min(visible, N)"
        },
        "a causal K/V tile skips its first queries": {"max(kv_begin + M - N, 0)": "max(kv_begin + M - N + BLOCK_Q, 0)"},
        "V comes from the first tile": {"load_tile(V_smem, V, kv_begin, N)": "load_tile(V_smem, V, 0, N)"},
        "tiles read past the last row": {"begin + row < rows ?": "begin + row <= rows ?"},
    },
    "v02_fa2": ONLINE
    | TILED
    | {
        "no barrier after the tiles are loaded": no_barrier("the tiles are whole"),
        "no barrier before the softmax": no_barrier("S is whole"),
        "no barrier after the softmax": no_barrier("P and rescale are whole"),
        "no barrier before the next tiles": no_barrier("everyone is done with the tiles"),
        "O is not rescaled": {"O_smem[row][column] * rescale_smem[row]": "O_smem[row][column]"},
        "l is not rescaled": {"l_smem[threadIdx.x] * rescale + sum": "l_smem[threadIdx.x] + sum"},
        "the maximum forgets earlier tiles": {"float m_new = m_old;": "float m_new = -INFINITY;"},
        "the final division is left out": {"O_smem[row][column] / sum": "O_smem[row][column]"},
        "an empty row is divided by 0": {"sum == 0 ? 0 : ": ""},
        "lse lacks the maximum": {"m_smem[threadIdx.x] + logf(": "logf("},
    },
    "v03_warp_local": ONLINE
    | TILED
    | {
        "no barrier after K is loaded": no_barrier("K (at first Q too) is whole"),
        "no barrier before V overwrites K": no_barrier("every warp is done with K"),
        "no barrier after V is loaded": no_barrier("V is whole"),
        "no barrier before K overwrites V": no_barrier("every warp is done with V"),
        "no warp barrier between P and its readers": no_barrier("P is whole", "__syncwarp()"),
        "O is not rescaled": {"O_rmem[r][c] *= rescale": "O_rmem[r][c] *= 1"},
        "l is not rescaled": {"l_rmem[r] * rescale + warp_sum(p)": "l_rmem[r] + warp_sum(p)"},
        "the sum is one lane's": {"warp_sum(p)": "p"},
        "the maximum is one lane's": {"warp_max(s)": "s"},
        "the maximum forgets earlier tiles": {"fmaxf(m_rmem[r], warp_max(s))": "warp_max(s)"},
        "the final division is left out": {"O_rmem[r][c] / l_rmem[r]": "O_rmem[r][c]"},
        "an empty row is divided by 0": {"l_rmem[r] == 0 ? 0 : ": ""},
        "lse lacks the maximum": {"m_rmem[r] + logf(": "logf("},
    },
}
