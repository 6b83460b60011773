"""The contract, the same for every version: what is accepted, what comes back, and how PyTorch sees it.

Every version is the operator torch.ops.flash_tutorial.<name>; `attention` takes the version by name, or the path of a
reader's own kernel. The operators are written in Python around a raw one, which does the work: see registry.py.
"""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
import os
import zlib

import torch

from flash_tutorial import build, emulator, registry, tune
from flash_tutorial.versions import VERSIONS, Version, accepting

_FLOAT32_MAX = torch.finfo(torch.float32).max
_LONGEST = 2**31 - 2**10  # of M + N: kernels add lengths, and a tile, as ints
_ALIGNMENT = 16  # bytes: the widest access of a kernel

# ---------------------------------------------------------------------------------------------------------- attention


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    version: str | int | os.PathLike | Version,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    like: str | int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale·q·kᵀ)·v by one version's kernel: on a GPU for CUDA tensors, on the emulator for CPU tensors.
    On a GPU that `flash-tutorial tune` has measured a version with several tile shapes takes the one found best there.

    q        (batch, heads, M, head_dim)
    k, v     (batch, kv_heads, N, head_dim); heads is a multiple of kv_heads, and each K/V head serves heads / kv_heads
             neighbouring query heads. M and N are any lengths, 0 included, head_dim is 1 to 128, strides are arbitrary.
    version  a name ("v03", 3, "warp_local") or the path of a reader's own .cu file, which is compiled when it is new
    causal   query i sees keys j <= i + N - M only
    scale    any finite number; None: 1 / sqrt(head_dim)
    like     the version whose dtypes and head sizes a reader's file has, if its name does not say so

    Returns out, with q's shape, dtype and device, contiguous; with `return_lse` also lse, (batch, heads, M) float32:
    the natural logarithm of the sum of exp(score) over a row. A row that sees no key is 0, its lse -inf.

    Raises ValueError for shapes, devices, a scale or a version that are not accepted, TypeError for arguments of a
    wrong type or dtype, NotImplementedError for a GPU that is too old and in a backward pass, BuildError if the kernel
    does not compile, and KernelFinding if the emulator sees it do wrong.
    """
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
        if tensor.is_nested:
            raise ValueError(f"{name} is a nested tensor: only strided (dense) tensors are accepted")
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name} is on {tensor.device}: accepted are cpu (the emulator) and cuda")
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, not {causal!r}")
    if scale is not None:
        if isinstance(scale, bool) or not isinstance(scale, numbers.Real | torch.SymFloat):
            raise TypeError(f"scale must be a float or None, not {scale!r}")
        try:
            scale = float(scale)
        except OverflowError:  # a whole number beyond every float: as infinite it is refused
            scale = math.inf
    operator = getattr(torch.ops.flash_tutorial, _operator_name(version, like)).default
    out, lse = operator(q, k, v, causal, scale)
    return (out, lse) if return_lse else out


# ---------------------------------------------------------------------------------------------------------- operators

_namespace = torch.library.Library("flash_tutorial", "DEF")
_SCHEMA = "(Tensor q, Tensor k, Tensor v, bool causal=False, float? scale=None) -> (Tensor out, Tensor lse)"


@torch.compiler.assume_constant_result  # torch.compile does not look inside
def _operator_name(version, like=None) -> str:
    """The name of a version's operator. A reader's file has one for each version that it is said to be like."""
    return _define(registry.resolve(version, like))


@functools.cache
def _define(version: Version) -> str:
    name = version.name
    if version.own is not None:
        name = f"{build.operator_name(version.own)}_{zlib.crc32(f'{version.number} {version.own}'.encode()):08x}"
    _namespace.define(name + _SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    _namespace.impl(name, functools.partial(_run, version), "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash_tutorial::{name}", functools.partial(_fake, version), lib=_namespace)
    torch.library.register_autograd(
        f"flash_tutorial::{name}", functools.partial(_backward, version), setup_context=_keep_inputs, lib=_namespace
    )
    return name


def _run(version: Version, q, k, v, causal=False, scale=None):
    """The operator on real tensors."""
    _check(version, q, k, v, scale)
    head_dim = q.shape[3]
    if scale is None:
        scale = 1 / math.sqrt(head_dim)  # of the true head size, not the padded one
    padding = min(size for size in version.head_dims if size >= head_dim) - head_dim
    q, k, v = (_as_kernel_wants(version, tensor, padding) for tensor in (q, k, v))

    on_gpu = q.device.type == "cuda"
    backend = "cuda" if on_gpu else "instrumented" if emulator.is_instrumenting() else "emulated"
    operator = registry.operator(version, backend)
    tiles = tune.choice(version, operator, q, k, causal)
    with contextlib.nullcontext() if on_gpu else emulator.launching():  # raises KernelFinding
        out, lse, _ = operator(q, k, v, causal, scale, tiles)
    return (out[..., :head_dim].contiguous() if padding else out), lse


def _as_kernel_wants(version: Version, tensor: torch.Tensor, padding: int) -> torch.Tensor:
    """The tensor, its head size padded with zeros, which add nothing to any product: itself if the version's kernel can
    read it in place, else a contiguous copy."""
    if padding:
        return torch.nn.functional.pad(tensor, (0, padding)).contiguous()
    in_place = tensor.data_ptr() % _ALIGNMENT == 0 and (_in_rows(tensor) if version.strided else tensor.is_contiguous())
    return tensor if in_place else tensor.clone(memory_format=torch.contiguous_format)


def _in_rows(tensor: torch.Tensor) -> bool:
    """Whether a row's elements are neighbours, and all rows begin at multiples of 16 bytes if the first does."""
    return all(
        stride == 1 if dim == 3 else stride * tensor.element_size() % _ALIGNMENT == 0
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if size > 1  # else no stride is taken
    )


def _fake(version: Version, q, k, v, causal=False, scale=None):
    """The operator's result without its values, for torch.compile and meta tensors."""
    _check(version, q, k, v, scale)
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def _keep_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])


def _backward(version: Version, ctx, grad_out, grad_lse):
    """Refuses through an operator, because torch.compile traces a backward pass that may never run."""
    refuse = torch.ops.flash_tutorial.no_backward
    return *(refuse(grad_out, grad_lse, tensor, version.name) for tensor in ctx.saved_tensors), None, None


def _no_backward(grad_out, grad_lse, tensor, version: str):
    raise NotImplementedError(
        f"{version} has no backward pass yet: call it under torch.no_grad(), or on tensors that need no gradient"
    )


def _fake_no_backward(grad_out, grad_lse, tensor, version: str):
    return torch.empty_like(tensor)


_namespace.define("no_backward(Tensor grad_out, Tensor grad_lse, Tensor tensor, str version) -> Tensor")
_namespace.impl("no_backward", _no_backward, "CompositeExplicitAutograd")
torch.library.register_fake("flash_tutorial::no_backward", _fake_no_backward, lib=_namespace)


# ---------------------------------------------------------------------------------------------------------- refusals


def _check(version: Version, q, k, v, scale) -> None:
    """Raises for whatever a version does not take, naming the argument, what came and what is accepted."""
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        if tensor.layout != torch.strided:
            raise ValueError(f"{name} is {tensor.layout}: only strided (dense) tensors are accepted")
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} has {tensor.dim()} dimensions, shape {tuple(tensor.shape)}: "
                "accepted is (batch, heads, length, head_dim)"
            )
    dtype = str(q.dtype).removeprefix("torch.")
    if dtype not in version.dtypes:
        others = ", ".join(other.name for other in accepting(dtype)) or "no version"
        raise TypeError(
            f"q is {dtype}: {version.name} accepts {' and '.join(version.dtypes)}; {dtype} is accepted by {others}"
        )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} is {str(tensor.dtype).removeprefix('torch.')} and q {dtype}: all must be alike")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} and q on {q.device}: all must be on one device")
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"q is on {q.device}: accepted are cpu (the emulator) and cuda")
    if q.device.type == "cuda":
        _check_gpu(version, q.device.index)

    batch, heads, _, head_dim = q.shape
    kv_heads = k.shape[1]
    if k.shape[0] != batch:
        raise ValueError(f"k has batch size {k.shape[0]} and q {batch}: they must be equal")
    if not 1 <= head_dim <= max(version.head_dims):
        raise ValueError(f"q has head_dim {head_dim}: {version.name} accepts 1 to {max(version.head_dims)}")
    if k.shape[3] != head_dim:
        raise ValueError(f"k has head_dim {k.shape[3]} and q {head_dim}: they must be equal")
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)} and k {tuple(k.shape)}: they must be equal")
    if q.shape[2] + k.shape[2] > _LONGEST:
        raise ValueError(f"q has length {q.shape[2]} and k {k.shape[2]}: together {_LONGEST} or less is accepted")
    if kv_heads == 0 and heads > 0:
        raise ValueError(f"k has 0 heads and q {heads}: k and v need at least one")
    if kv_heads > 0 and heads % kv_heads:
        raise ValueError(f"q has {heads} heads, k and v {kv_heads}: q's must be a multiple of theirs")
    if scale is not None and not abs(scale) <= _FLOAT32_MAX:
        raise ValueError(f"scale is {scale}: accepted is any number that is finite in float32")


@functools.cache
def _check_gpu(version: Version, index: int) -> None:
    found = torch.cuda.get_device_capability(index)
    if found < build.capability(version.min_arch):
        raise NotImplementedError(
            f"{version.name} needs a GPU of compute capability {version.min_arch} or later; cuda:{index} "
            f"({torch.cuda.get_device_name(index)}) has {found[0]}.{found[1]}"
        )


for _version in VERSIONS:
    _define(_version)
