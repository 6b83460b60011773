"""What a kernel is held against: attention in float64, PyTorch in the inputs' precision, and PyTorch's fused kernels.

A result is right if its error against float64 is at most twice that of plain PyTorch in the same precision, plus a
small constant: see `check`. All functions take q (batch, heads, M, head_dim), k and v (batch, kv_heads, N, head_dim),
and mean by `causal` that query i sees keys j <= i + N - M, on any device.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

SLACK = {torch.float32: 1e-6, torch.float16: 1e-4, torch.bfloat16: 1e-4}
_CHUNK = 2**26  # scores held at a time


# -------------------------------------------------------------------------------------------------------- references


def attention_float64(q, k, v, causal: bool = False, scale: float | None = None):
    """(out, lse) in float64: out (batch, heads, M, head_dim), lse (batch, heads, M), natural log.

    A row that sees no key, or only scores of -inf, is 0 and its lse -inf; one with a NaN or +inf score is NaN.
    """
    q, k, v = q.double(), k.double(), v.double()
    batch, heads, queries, _ = shape = q.shape
    # A few (batch, head) pairs at a time, each with its K/V head, so that long sequences fit into memory.
    group = heads // max(k.shape[1], 1)
    kv_of = torch.arange(batch * heads, device=q.device) // max(group, 1)
    q, k, v = (x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in (q, k, v))
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2])
    step = max(1, _CHUNK // max(queries * k.shape[1], 1))
    for some in (slice(start, start + step) for start in range(0, batch * heads, step)):
        out[some], lse[some] = _attention(q[some], k[kv_of[some]], v[kv_of[some]], causal, scale)
    return out.view(shape), lse.view(shape[:3])


def attention_same_precision(q, k, v, causal: bool = False, scale: float | None = None):
    """(out, lse) as plain PyTorch computes them: q·kᵀ in the inputs' dtype, the softmax in float32, P cast back, P·v.

    `out` has the inputs' dtype, `lse` is float32. A float32 product is one: TF32 is off.
    """
    group = q.shape[1] // max(k.shape[1], 1)
    if group > 1:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    with _full_precision():
        return _attention(q, k, v, causal, scale)


def _attention(q, k, v, causal, scale):
    """(out, lse) for equally many heads, q (…, M, head_dim), k and v (…, N, head_dim)."""
    queries, keys = q.shape[-2], k.shape[-2]
    if keys == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf, dtype=_softmax_dtype(q))
    scores = (q @ k.mT).to(_softmax_dtype(q)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(keys - queries + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    maximum = scores.amax(-1, keepdim=True)
    maximum = maximum.masked_fill(maximum == -math.inf, 0)  # an empty row: -inf - -inf would be NaN
    weights = (scores - maximum).exp()
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    out = (weights / total.masked_fill(empty, 1)).to(v.dtype) @ v
    return out.masked_fill(empty, 0), (maximum + total.log()).squeeze(-1)


def _softmax_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Float32 products in float32, whatever the process allows."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


@dataclass(frozen=True)
class Reference:
    """One of PyTorch's ways to attention: reference(q, k, v, causal, scale) -> out.

    Raises NotImplementedError, with PyTorch's reasons, for inputs that it does not support.
    """

    title: str
    backend: SDPBackend | None = None  # None: PyTorch's own choice
    function: Callable | None = None  # instead of scaled_dot_product_attention

    def __call__(self, q, k, v, causal: bool = False, scale: float | None = None) -> torch.Tensor:
        if self.function is not None:
            return self.function(q, k, v, causal, scale)
        queries, keys = q.shape[2], k.shape[2]
        if keys == 0:
            raise NotImplementedError("scaled_dot_product_attention does not define attention to no keys")
        if causal and queries > keys:  # the first queries see no key; scaled_dot_product_attention makes them NaN
            seeing = self(q[:, :, queries - keys :], k, v, causal, scale)
            return torch.nn.functional.pad(seeing, (0, 0, queries - keys, 0))

        options = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
        if causal and queries == keys:
            options["is_causal"] = True
        elif causal and self.backend == SDPBackend.FLASH_ATTENTION and q.is_cuda:  # takes no mask, but this bias
            options["attn_mask"] = causal_lower_right(queries, keys)
        elif causal:  # is_causal would align the mask to the upper left corner
            mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
            options["attn_mask"] = mask.tril(keys - queries)
        if self.backend is None:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        with warnings.catch_warnings(record=True) as reasons, sdpa_kernel(self.backend):
            warnings.simplefilter("always")
            try:
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
            except RuntimeError as error:
                if "No available kernel" not in str(error) and "No viable backend" not in str(error):
                    raise
                why = "; ".join(dict.fromkeys(str(reason.message).partition(" (Triggered")[0] for reason in reasons))
                on = f"{str(q.dtype).removeprefix('torch.')} on {q.device.type}"
                raise NotImplementedError(f"{self.title} does not support this input ({on}): {why or error}") from error


def _baseline(q, k, v, causal, scale):
    return attention_same_precision(q, k, v, causal, scale)[0]


#: By the name that tables and the command line know them by.
REFERENCES: dict[str, Reference] = {
    "baseline": Reference("softmax(q kᵀ) v in plain PyTorch", function=_baseline),
    "sdpa": Reference("PyTorch's scaled_dot_product_attention, its own choice"),
    "sdpa_flash": Reference("PyTorch's FlashAttention-2", SDPBackend.FLASH_ATTENTION),
    "sdpa_efficient": Reference("PyTorch's memory-efficient attention", SDPBackend.EFFICIENT_ATTENTION),
    "sdpa_math": Reference("PyTorch's separate products and softmax", SDPBackend.MATH),
    "sdpa_cudnn": Reference("PyTorch's cuDNN attention", SDPBackend.CUDNN_ATTENTION),
}


# ----------------------------------------------------------------------------------------------------------- judging


@dataclass(frozen=True)
class Check:
    """How a result compares. `ok`: it is right; otherwise `detail` says what is wrong and where."""

    error: float  # the largest distance of `out` from float64
    pytorch_error: float  # that of plain PyTorch in the same precision
    limit: float  # what `error` may be
    ok: bool
    detail: str = ""


def error(result: torch.Tensor, exact: torch.Tensor, relative: bool = False) -> torch.Tensor:
    """The distance of each element from the exact one; inf where NaN or an infinity is not where it belongs.

    `relative` divides it by max(1, |exact|).
    """
    result = result.double()
    distance = (result - exact).abs()
    if relative:
        distance = distance / exact.abs().clamp(min=1)
    same = (result == exact) | (result.isnan() & exact.isnan())
    return torch.where(result.isfinite() & exact.isfinite(), distance, torch.where(same, 0.0, math.inf))


def limit(q, k, v, causal: bool = False, scale: float | None = None, expected: torch.Tensor | None = None) -> float:
    """The largest error that `out` may have: twice plain PyTorch's in the same precision, plus SLACK.

    `expected`: attention_float64's out, where it is at hand.
    """
    expected = attention_float64(q, k, v, causal, scale)[0] if expected is None else expected
    return 2 * _largest_finite(error(attention_same_precision(q, k, v, causal, scale)[0], expected)) + SLACK[q.dtype]


def check(out, lse, q, k, v, causal: bool = False, scale: float | None = None) -> Check:
    """Judges `out` (q's shape) and, unless it is None, `lse` (batch, heads, M) against float64.

    Each may be off by twice what plain PyTorch in the same precision is, plus SLACK for `out`, plus a relative 1e-6 for
    `lse`, which grows with the scores. NaN and infinities must be exactly where float64 has them.
    """
    exact, exact_lse = attention_float64(q, k, v, causal, scale)
    pytorch, pytorch_lse = attention_same_precision(q, k, v, causal, scale)
    parts = [("out", out, exact, pytorch, SLACK[q.dtype], False)]
    if lse is not None:
        parts.append(("lse", lse, exact_lse, pytorch_lse, 1e-6, True))

    figures, complaints = {}, []
    for name, result, right, plain, slack, relative in parts:
        if result.shape != right.shape:
            raise ValueError(f"{name} has shape {tuple(result.shape)}: {tuple(right.shape)} is what q asks for")
        errors = error(result, right, relative)
        plain_error = _largest_finite(error(plain, right, relative))
        allowed = 2 * plain_error + slack
        largest = errors.max().item() if errors.numel() else 0.0
        figures[name] = largest, plain_error, allowed
        if not largest <= allowed:
            where = tuple(torch.unravel_index(errors.argmax(), errors.shape))
            complaints.append(
                f"{name}[{', '.join(str(int(i)) for i in where)}] is {result[where].item():.7g} instead of "
                f"{right[where].item():.7g}: off by {largest:.2e}, {allowed:.2e} is accepted"
            )
    return Check(*figures["out"], ok=not complaints, detail="; ".join(complaints))


def _largest_finite(errors: torch.Tensor) -> float:
    """0 if there is none: where PyTorch itself overflows it excuses nothing."""
    finite = errors[errors.isfinite()]
    return finite.max().item() if finite.numel() else 0.0
