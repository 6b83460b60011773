"""What a kernel is held against: attention in float64, PyTorch in the inputs' precision, PyTorch's fused kernels, and
those of other packages where they are installed.

A result is right if its error against float64 is at most twice that of plain PyTorch in the same precision, plus a
small constant: see `Judge`. All functions take q (batch, heads, M, head_dim), k and v (batch, kv_heads, N, head_dim),
and mean by `causal` that query i sees keys j <= i + N - M, on any device.
"""

from __future__ import annotations

import contextlib
import importlib
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
    return _in_parts(q, k, v, causal, scale, torch.float64)


def attention_same_precision(q, k, v, causal: bool = False, scale: float | None = None):
    """(out, lse) as plain PyTorch computes them: q·kᵀ in the inputs' dtype, the softmax in float32, P cast back, P·v.

    `out` has the inputs' dtype, `lse` is float32. A float32 product is one: TF32 is off.
    """
    with full_precision():
        return _in_parts(q, k, v, causal, scale, q.dtype)


def _in_parts(q, k, v, causal, scale, dtype: torch.dtype):
    """(out, lse) in `dtype`, a few heads, or of one head with many scores a few queries, at a time: all scores at once
    would take 17 GB in float32 for 16 heads at a length of 16,384."""
    batch, heads, queries, _ = shape = q.shape
    keys = k.shape[2]
    kv_of = torch.arange(batch * heads, device=q.device) // max(heads // max(k.shape[1], 1), 1)
    q, k, v = (x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in (q, k, v))
    out = q.new_empty(q.shape, dtype=dtype)
    lse = q.new_empty(q.shape[:2], dtype=_softmax_dtype(out))
    some_heads = max(1, _CHUNK // max(queries * keys, 1))
    some_queries = queries if queries * keys <= _CHUNK else max(1, _CHUNK // keys)
    for pairs in (slice(start, start + some_heads) for start in range(0, batch * heads, some_heads)):
        k_part, v_part = (x[kv_of[pairs]].to(dtype) for x in (k, v))
        for first in range(0, queries, max(some_queries, 1)):
            rows = slice(first, first + some_queries)
            q_part = q[pairs, rows].to(dtype)
            out[pairs, rows], lse[pairs, rows] = _attention(
                q_part, k_part, v_part, causal, scale, offset=keys - queries + first
            )
    return out.view(shape), lse.view(shape[:3])


def _attention(q, k, v, causal, scale, offset: int):
    """(out, lse) for equally many heads, q (…, M, head_dim), k and v (…, N, head_dim); with `causal` query i sees keys
    j <= i + offset."""
    queries, keys = q.shape[-2], k.shape[-2]
    if keys == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf, dtype=_softmax_dtype(q))
    scores = (q @ k.mT).to(_softmax_dtype(q)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(offset + 1)
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
def full_precision() -> Iterator[None]:
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
    """What attention_same_precision computes, all of it at once, as whoever writes it down in PyTorch has it."""
    group = q.shape[1] // max(k.shape[1], 1)
    if group > 1:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    with full_precision():
        return _attention(q, k, v, causal, scale, offset=k.shape[2] - q.shape[2])[0]


#: By the name that tables and the command line know them by.
REFERENCES: dict[str, Reference] = {
    "baseline": Reference("softmax(q kᵀ) v in plain PyTorch", function=_baseline),
    "sdpa": Reference("PyTorch's scaled_dot_product_attention, its own choice"),
    "sdpa_flash": Reference("PyTorch's FlashAttention-2", SDPBackend.FLASH_ATTENTION),
    "sdpa_efficient": Reference("PyTorch's memory-efficient attention", SDPBackend.EFFICIENT_ATTENTION),
    "sdpa_math": Reference("PyTorch's separate products and softmax", SDPBackend.MATH),
    "sdpa_cudnn": Reference("PyTorch's cuDNN attention", SDPBackend.CUDNN_ATTENTION),
}


# --------------------------------------------------------------------------------------------------- other packages


@dataclass(frozen=True)
class Peer:
    """Attention of another package: peer(q, k, v, causal, scale) -> out.

    Raises ImportError, saying why, if the package cannot be imported, and NotImplementedError for a dtype that it does
    not take.
    """

    title: str
    module: str
    function: (
        Callable  # function(module, q, k, v, causal, scale) -> out, or (out, lse): (batch, length, heads, head_dim)
    )
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)

    def __call__(self, q, k, v, causal: bool = False, scale: float | None = None) -> torch.Tensor:
        module = self._import()
        if q.dtype not in self.dtypes:
            came, *taken = (str(dtype).removeprefix("torch.") for dtype in (q.dtype, *self.dtypes))
            raise NotImplementedError(f"{self.title} takes {' and '.join(taken)}, not {came}")
        out = self.function(module, *(tensor.transpose(1, 2) for tensor in (q, k, v)), causal, scale)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    @property
    def installed(self) -> bool:
        """Whether the package is there, be it one that cannot be imported."""
        try:
            self._import()
        except ImportError as error:
            cause = error.__cause__
            missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
            return missing is None or not f"{self.module}.".startswith(f"{missing}.")
        return True

    def _import(self):
        try:
            return importlib.import_module(self.module)
        except Exception as error:  # whatever a package does when it is imported
            raise ImportError(f"{self.module} cannot be imported: {type(error).__name__}: {error}") from error


def _flash_attn(module, q, k, v, causal, scale):
    return module.flash_attn_func(q, k, v, softmax_scale=scale, causal=causal)


def _xformers(module, q, k, v, causal, scale):
    mask = module.fmha.attn_bias.LowerTriangularFromBottomRightMask() if causal else None
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads != kv_heads:  # a dimension of its own tells which query heads share a K/V head
        group = heads // kv_heads
        q = q.unflatten(2, (kv_heads, group))
        k, v = (x.unsqueeze(3).expand(-1, -1, -1, group, -1) for x in (k, v))
    out = module.memory_efficient_attention(q, k, v, attn_bias=mask, scale=scale)
    return out.flatten(2, 3) if heads != kv_heads else out


#: By the name that tables and the command line know them by.
PEERS: dict[str, Peer] = {
    "flash_attn": Peer("flash-attn, FlashAttention-2", "flash_attn.flash_attn_interface", _flash_attn),
    "flash_attn_3": Peer("flash-attn, FlashAttention-3", "flash_attn_interface", _flash_attn),
    "flash_attn_4": Peer("flash-attn, FlashAttention-4", "flash_attn.cute", _flash_attn),
    "xformers": Peer(
        "xFormers' memory-efficient attention",
        "xformers.ops",
        _xformers,
        (torch.float32, torch.float16, torch.bfloat16),
    ),
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


class Judge:
    """What results of one problem are held against: float64, and how far plain PyTorch in the same precision is off it.

    `out` may be off by twice what PyTorch's is, plus SLACK, `lse` likewise, plus a relative 1e-6 as it grows with the
    scores. NaN and infinities must be exactly where float64 has them.
    """

    def __init__(self, q, k, v, causal: bool = False, scale: float | None = None):
        exact = attention_float64(q, k, v, causal, scale)
        plain = attention_same_precision(q, k, v, causal, scale)
        relative, slack = (False, True), (SLACK[q.dtype], 1e-6)
        self._exact = exact
        self._plain_errors = [_largest_finite(error(*each)) for each in zip(plain, exact, relative, strict=True)]
        self._limits = [2 * plain_error + more for plain_error, more in zip(self._plain_errors, slack, strict=True)]

    def __call__(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> Check:
        """Judges `out` (q's shape) and, unless it is None, `lse` (batch, heads, M).

        Raises ValueError for a result of another shape.
        """
        largest, complaints = [], []
        for name, result, right, allowed in zip(("out", "lse"), (out, lse), self._exact, self._limits, strict=True):
            if result is None:
                continue
            if result.shape != right.shape:
                raise ValueError(f"{name} has shape {tuple(result.shape)}: {tuple(right.shape)} is what q asks for")
            errors = error(result, right, relative=name == "lse")
            largest.append(errors.max().item() if errors.numel() else 0.0)
            if not largest[-1] <= allowed:
                where = tuple(torch.unravel_index(errors.argmax(), errors.shape))
                complaints.append(
                    f"{name}[{', '.join(str(int(i)) for i in where)}] is {result[where].item():.7g} instead of "
                    f"{right[where].item():.7g}: off by {largest[-1]:.2e}, {allowed:.2e} is accepted"
                )
        return Check(largest[0], self._plain_errors[0], self._limits[0], not complaints, "; ".join(complaints))


def check(out, lse, q, k, v, causal: bool = False, scale: float | None = None) -> Check:
    """Judges one result, `out` and, unless it is None, `lse`: see Judge, which judges several of the same problem."""
    return Judge(q, k, v, causal, scale)(out, lse)


def _largest_finite(errors: torch.Tensor) -> float:
    """0 if there is none: where PyTorch itself overflows it excuses nothing."""
    finite = errors[errors.isfinite()]
    return finite.max().item() if finite.numel() else 0.0
