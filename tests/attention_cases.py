"""The cases that every version is tested on, the tensors they stand for, and the one function that judges a result.

A case is one value from each of AXES. `suite` picks few of them in which every pair of values meets, and adds EDGES;
`product` gives them all. `check` runs a version on a case's tensors and raises AssertionError, or the emulator's
KernelFinding, if anything about the result is wrong. The mutation tests call the same `check`: what it cannot see, no
test here can.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

import flash_tutorial as ft
from flash_tutorial import reference

LARGE_SCALE = 1000.0

AXES: dict[str, tuple] = {
    "lengths": (  # (M, N)
        *((0, 5), (5, 0), (1, 1), (1, 239), (3, 17)),
        *((64, 64), (97, 130), (113, 203), (128, 217), (256, 203)),
    ),
    "heads": ((2, 1, 1), (1, 6, 2), (2, 4, 1)),  # (batch, heads, kv_heads)
    "head_dim": (1, 8, 32, 40, 64, 80, 96, 128),
    "causal": (False, True),
    "scale": (None, 0.0, -0.1, LARGE_SCALE),
    "layout": ("contiguous", "misaligned", "transposed", "interleaved", "every_other", "expanded"),
    "values": ("normal", "huge", "minus_inf_keys", "minus_inf_rows", "nan_scores", "nonfinite_v"),
}

# Empty tensors, a scale of 0 and rows of NaN hide most mistakes, so a pair of values that only meets there is hardly
# tested: pairs are covered once among these values alone, and once among all.
TELLING = {
    "lengths": tuple((queries, keys) for queries, keys in AXES["lengths"] if queries * keys > 1),
    "scale": (None, -0.1),
    "values": ("normal",),
}


class Case(NamedTuple):
    lengths: tuple[int, int]
    heads: tuple[int, int, int]
    head_dim: int
    causal: bool
    scale: float | None
    layout: str
    values: str
    dtype: str

    def __str__(self) -> str:
        (queries, keys), (batch, heads, kv_heads) = self.lengths, self.heads
        scale = "default" if self.scale is None else f"{self.scale:g}"
        mask = "causal" if self.causal else "full"
        shape = f"B{batch}-H{heads}/{kv_heads}-M{queries}-N{keys}-D{self.head_dim}"
        return f"{shape}-{self.dtype}-{mask}-scale_{scale}-{self.layout}-{self.values}"

    @property
    def work(self) -> int:
        """Multiply-adds of the two products."""
        return 2 * self.lengths[0] * self.lengths[1] * self.heads[0] * self.heads[1] * self.head_dim


# What no pair of values makes. A layout of three words is q's, k's and v's. A scale of ln 2: scores are powers of 2.
EDGES = (
    Case((2, 64), (1, 2, 1), 32, True, None, "contiguous", "normal", ""),  # the first row misses one key of a tile
    Case((99, 5), (1, 2, 1), 32, True, None, "contiguous", "normal", ""),  # rows that are 64 and more before any key
    Case((19, 200), (1, 2, 2), 32, False, math.log(2), "contiguous", "steps", ""),
    Case((32, 4096), (1, 1, 1), 32, False, 1.0, "contiguous", "alike", ""),
    Case((5, 70), (1, 2, 2), 32, False, None, "contiguous/interleaved/contiguous", "normal", ""),
    Case((5, 70), (1, 2, 2), 32, False, None, "contiguous/contiguous/interleaved", "normal", ""),
)


def suite(dtypes: Sequence[str]) -> list[Case]:
    """The cases of an ordinary test run, for a version that takes `dtypes`; the cheapest first."""
    axes = AXES | {"dtype": tuple(dtypes)}
    cases = [Case(**row) for row in (*pairwise(axes | TELLING), *pairwise(axes))]
    cases += [edge._replace(dtype=dtype) for edge in EDGES for dtype in dtypes]
    return sorted(dict.fromkeys(cases), key=lambda case: case.work)


def product(dtypes: Sequence[str], **only: Sequence) -> list[Case]:
    """Every combination of AXES, or of the values in `only` for the axes it names; the cheapest first."""
    axes = AXES | {"dtype": tuple(dtypes)} | only
    return sorted((Case(*values) for values in itertools.product(*axes.values())), key=lambda case: case.work)


def pairwise(axes: Mapping[str, Sequence]) -> Iterator[dict]:
    """Rows, one value from each axis, in which every two values of every two axes meet.

    Greedy and deterministic: each row starts from the first pair that has not met yet, then takes, axis by axis, the
    value that makes the most new pairs with the values it already has; the one used least so far where that is equal.
    """
    missing = {
        ((a, i), (b, j)): None
        for a, b in itertools.combinations(axes, 2)
        for i, j in itertools.product(range(len(axes[a])), range(len(axes[b])))
    }
    order = {axis: position for position, axis in enumerate(axes)}
    used = {axis: [0] * len(values) for axis, values in axes.items()}

    def pairs(row: dict, axis: str, i: int) -> list:
        return [tuple(sorted((known, (axis, i)), key=lambda entry: order[entry[0]])) for known in row.items()]

    while missing:
        row = dict(next(iter(missing)))
        for axis in axes:
            if axis not in row:
                gain = {i: sum(pair in missing for pair in pairs(row, axis, i)) for i in range(len(axes[axis]))}
                row[axis] = max(gain, key=lambda i: (gain[i], -used[axis][i]))
        for axis, i in row.items():
            used[axis][i] += 1
        for a, b in itertools.combinations(axes, 2):
            missing.pop(((a, row[a]), (b, row[b])), None)
        yield {axis: axes[axis][row[axis]] for axis in axes}


# ---------------------------------------------------------------------------------------------------- tensors


def make_inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The case's q (batch, heads, M, head_dim), k and v (batch, kv_heads, N, head_dim), contiguous on the CPU."""
    (queries, keys), (batch, heads, kv_heads), dim = case.lengths, case.heads, case.head_dim
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))

    def normal(heads: int, length: int) -> torch.Tensor:
        return torch.randn(batch, heads, length, dim, generator=generator)

    def integers(heads: int, length: int) -> torch.Tensor:
        return torch.randint(-2, 3, (batch, heads, length, dim), generator=generator).float()

    q, k, v = normal(heads, queries), normal(kv_heads, keys), normal(kv_heads, keys)
    # Few enough bits that fp32 holds the scores (nearly) exactly, in whatever order they are summed, and too many for
    # TF32. The comparison with PyTorch is then one of methods, not of luck in rounding, which the exponential would
    # blow up, above all with a large scale.
    steps = 4 if case.scale == LARGE_SCALE else 1024
    q, k = (torch.round(steps * x) / steps for x in (q, k))

    if case.values == "huge":
        # Scores near the end of fp32's range, exact as well, in rows that are negative throughout and rows that are
        # positive: the maximum must not start from 0 or from a "very negative" number. fp16 has no such range.
        magnitude = 2.0**2 if case.dtype == "float16" else 2.0**52 if case.scale == LARGE_SCALE else 2.0**58
        q, k = integers(heads, queries), integers(kv_heads, keys)
        q[..., 0] = torch.where(torch.arange(queries) % 2 == 0, -8.0, 8.0)
        k[..., 0] = 7 + k[..., 0].sign()
        q, k = q * magnitude, k * magnitude
    elif case.values == "minus_inf_keys":
        # Whole K/V tiles of −inf scores, before the first finite one in one head, after the last in the next.
        q[..., 0] = q[..., 0].abs() + 0.5
        half = keys // 2
        k[:, 0::2, :half, 0] = -torch.inf
        k[:, 1::2, half:, 0] = -torch.inf
    elif case.values == "minus_inf_rows":
        # Every third query has only −inf scores (NaN at scale 0, +inf below).
        q[..., 0::3, 0] = -torch.inf
        k[..., 0] = k[..., 0].abs() + 0.5
    elif case.values == "nan_scores":
        # Rows of NaN, rows that hold ±inf, and, in every second K/V head, one key that makes all its rows NaN.
        q[..., 1::5, 0] = torch.nan
        q[..., 2::5, 0] = torch.inf
        k[:, 1::2, keys // 3 : keys // 3 + 1, 0] = torch.nan
    elif case.values == "steps":
        # Scores that are the same for 64 keys and then grow, by 0 for the first query and by one more for each; in the
        # next head they fall.
        q, k = torch.zeros_like(q), torch.zeros_like(k)
        q[..., 0] = torch.arange(queries)
        k[:, 0::2, :, 0] = torch.arange(keys) // 64
        k[:, 1::2, :, 0] = torch.arange(keys).flip(0) // 64
    elif case.values == "alike":
        # The first and the last key's score is the highest, all others are one, so a row is a sum of thousands of equal
        # weights: rounding each sum so far would be off by the same, every time.
        q, k = torch.zeros_like(q), torch.zeros_like(k)
        q[..., 0] = torch.arange(1, queries + 1) / 16
        k[..., [0, -1], 0] = 1
    elif case.values == "nonfinite_v":
        v[..., keys // 3 : keys // 3 + 1, 0] = torch.nan
        if case.scale != LARGE_SCALE:  # there a weight is 0 in fp32 but not in float64, and 0·inf is NaN
            v[..., keys // 2 : keys // 2 + 1, dim // 2] = torch.inf
            v[..., keys - 1 :, dim - 1] = -torch.inf

    return tuple(x.to(getattr(torch, case.dtype)) for x in (q, k, v))


SLACK = {torch.float32: 1e-6, torch.float16: 1e-4, torch.bfloat16: 1e-4}
GUARD = 64  # poisoned elements before and after a tensor: a multiple of 16 bytes in every dtype


def place(tensor: torch.Tensor, layout: str, device: str) -> torch.Tensor:
    """A view with the values of `tensor` (batch, heads, length, head_dim), laid out as `layout` says, on `device`.

    Every byte of its storage that the view does not show is 0xFF: a NaN in each dtype. "expanded" has one head's
    values in all heads. A strided kernel reads "expanded", and if 8 divides head_dim "interleaved", where it is.
    """
    _, heads, length, dim = shape = tensor.shape
    row = dim + 3
    strides = {
        "contiguous": (heads * length * dim, length * dim, dim, 1),
        "misaligned": (heads * length * dim, length * dim, dim, 1),
        "transposed": (length * heads * row, row, heads * row, 1),  # (batch, length, heads, dim + 3) in memory
        "interleaved": (length * heads * (dim + 8), dim + 8, heads * (dim + 8), 1),  # transposed, with 8 between rows
        "every_other": (2 * heads * length * dim, 2 * length * dim, 2 * dim, 2),
        "expanded": (length * dim, 0, dim, 1),
    }[layout]
    offset = GUARD + (layout == "misaligned")
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides)) + 1 if tensor.numel() else 0
    poison = torch.full(((extent + offset + GUARD) * tensor.element_size(),), 0xFF, dtype=torch.uint8, device=device)
    storage = poison.view(tensor.dtype)
    shown = storage.as_strided(shape, strides, offset)
    if layout == "expanded":
        shown[:, :1].copy_(tensor[:, :1])
    else:
        shown.copy_(tensor)
    return shown


def stored_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the bytes of the whole storage that `tensor` is a view of."""
    return torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).clone()


# ---------------------------------------------------------------------------------------------------- judging


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """torch.empty, the binding's too, gives NaN: an element that a kernel forgets to write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def instrumented(device: str) -> contextlib.AbstractContextManager:
    """On a CPU: run instrumented, as a consumer GPU with 99 KB of shared memory a block. Findings raise."""
    return ft.emulator.instrument(arch="sm_86") if device == "cpu" else contextlib.nullcontext()


def check(version: str, case: Case, device: str = "cpu") -> None:
    """Runs `version` (a name, or the path of a .cu) on the case's tensors on `device`, and judges all that came of it.

    Raises AssertionError for a wrong result and flash_tutorial.KernelFinding for whatever the emulator found.
    """
    layouts = (case.layout.split("/") * 3)[:3]
    q, k, v = (place(tensor, layout, device) for tensor, layout in zip(make_inputs(case), layouts, strict=True))
    before = [stored_bytes(tensor) for tensor in (q, k, v)]
    with poisoned_allocations(), instrumented(device):
        out, lse = ft.attention(q, k, v, version=version, causal=case.causal, scale=case.scale, return_lse=True)
    for name, tensor, then in zip("qkv", (q, k, v), before):
        assert torch.equal(stored_bytes(tensor), then), f"{case}: {name}'s storage was written"
    judge(out, lse, q, k, v, case.causal, case.scale, str(case))


def judge(out, lse, q, k, v, causal: bool, scale: float | None, label: str) -> None:
    """Asserts that `out` and `lse` are as good as the contract asks: like float64's, with NaN and the infinities in the
    same places, and off by no more than twice what PyTorch in the same precision is, plus a little."""
    assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device), f"{label}: out is {describe(out)}"
    assert (lse.shape, lse.dtype, lse.device) == (q.shape[:3], torch.float32, q.device), (
        f"{label}: lse is {describe(lse)}"
    )

    exact = reference.attention_float64(q, k, v, causal, scale)
    # How far off PyTorch is depends on the order of its sums. For one query a GPU's is a tree, more exact than any
    # product of matrices, so the CPU's result counts too.
    devices = {q.device, torch.device("cpu")}
    pytorch = [
        [each.to(q.device) for each in reference.attention_same_precision(q.to(d), k.to(d), v.to(d), causal, scale)]
        for d in devices
    ]
    outs, lses = zip(*pytorch, strict=True)
    rows, columns = unspecified(q, k, v, causal)
    compare(f"{label}: out", out, exact[0], outs, ~(rows[..., None] | columns), SLACK[q.dtype])
    compare(f"{label}: lse", lse, exact[1], lses, ~rows, 1e-6, relative=True)


def compare(label, result, exact, pytorch, specified, slack: float, relative: bool = False) -> None:
    """Asserts that `result` is right where `specified`; `relative` divides errors by max(1, |exact|).

    `pytorch`: the results whose largest error, twice, `result` may have.
    """

    def error(tensor: torch.Tensor) -> torch.Tensor:
        return reference.error(tensor, exact, relative).where(specified, 0)  # inf where NaN or an infinity is wrong

    plain = torch.cat([error(each).flatten() for each in pytorch])
    limit = 2 * plain[plain.isfinite()].amax().item() + slack if plain.isfinite().any() else slack
    wrong = ~(error(result) <= limit)
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{label} is off by more than {limit:.2e} in {wrong.sum()} of {wrong.numel()} places, "
            f"first at {list(where)}: {result[where].item():.9g} instead of {exact[where].item():.9g}"
        )


def describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def unspecified(q, k, v, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What the contract leaves open: rows (batch, heads, M) from which the mask hides a key that is not finite, and
    elements (batch, heads, M, head_dim) from which it hides a value in the same column."""
    queries, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    hidden = torch.zeros(queries, keys, dtype=torch.float32, device=q.device)
    if causal:
        last = torch.arange(queries, device=q.device)[:, None] + keys - queries
        hidden = (torch.arange(keys, device=q.device) > last).float()
    odd_keys = (~k.isfinite()).any(-1, keepdim=True).float()  # (batch, kv_heads, N, 1)
    rows = (hidden @ odd_keys)[..., 0] > 0
    columns = hidden @ (~v.isfinite()).float() > 0
    return rows.repeat_interleave(group, 1), columns.repeat_interleave(group, 1)
