"""What the versions are compared on: one attention problem, random from a seed or read from a file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flash_tutorial.suites import DTYPES


@dataclass(frozen=True)
class Problem:
    """One attention problem: the shapes, what is asked, and where the numbers come from.

    `tensors()` gives q (batch, heads, queries, head_dim), k and v (batch, kv_heads, keys, head_dim): normal random
    numbers drawn on the CPU from `seed`, so that every device gets the same ones, or what `from_file` read.
    Raises ValueError naming the option, what came and what is accepted.
    """

    batch: int = 1
    heads: int = 2
    kv_heads: int | None = None  # None: as many as heads
    queries: int = 100
    keys: int = 127
    head_dim: int = 64
    dtype: str = "float32"
    causal: bool = False
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    device: str = "cpu"
    seed: int = 0
    stored: tuple[torch.Tensor, ...] | None = field(default=None, repr=False, compare=False)
    source: str | None = None  # where `stored` came from, for the reader

    def __post_init__(self):
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        for name, least in {"batch": 0, "heads": 1, "kv_heads": 1, "queries": 0, "keys": 0, "head_dim": 1}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value < 2**63:
                raise ValueError(f"{name} is {value!r}: it has to be a whole number, {least} or more, below 2^63")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads is {self.heads} and kv_heads is {self.kv_heads}: heads has to be a multiple of kv_heads, "
                "as each K/V head serves equally many query heads"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}: accepted are {', '.join(DTYPES)}")
        if self.scale is not None and not abs(self.scale) <= torch.finfo(torch.float32).max:
            raise ValueError(f"scale is {self.scale}: any number that is finite in float32 is accepted")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}: a whole number of 64 bits is accepted")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device!r}: accepted are cpu (the emulator) and cuda")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"device is 'cuda', but torch {torch.__version__} sees no CUDA GPU: use cpu (the emulator); "
                "`flash-tutorial doctor` says what is missing"
            )

    @classmethod
    def from_file(cls, path, prefix: str | None = None, **options) -> Problem:
        """The tensors q, k, v (or PREFIX.q, …) of a safetensors file; `options` are dtype, causal, scale and device.

        Without a dtype the file's own is kept. Raises ValueError for a file that is missing, damaged, lacks a tensor or
        holds one of a wrong shape or dtype.
        """
        tensors = _read_safetensors(Path(path), prefix)
        q, k, v = tensors.values()
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        if any(tensor.dim() != 4 for tensor in (q, k, v)):
            raise ValueError(f"{path} holds {shapes}: each has to be (batch, heads, length, head_dim)")
        if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
            raise ValueError(f"{path} holds {shapes}: k and v have to be alike, and to share batch and head_dim with q")
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in (q, k, v)}
        if len(dtypes) > 1 or not dtypes <= set(DTYPES):
            raise ValueError(f"{path} holds {', '.join(sorted(dtypes))}: q, k and v have to be of one of {DTYPES}")
        dtype = options.pop("dtype", None) or dtypes.pop()
        return cls(
            batch=q.shape[0],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            queries=q.shape[2],
            keys=k.shape[2],
            head_dim=q.shape[3],
            dtype=dtype,
            stored=(q, k, v),
            source=f"{Path(path).name}{f', {prefix}' if prefix else ''}",
            **options,
        )

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v, contiguous, in the problem's dtype and on its device. Raises ValueError if they do not fit there."""
        queries = (self.batch, self.heads, self.queries, self.head_dim)
        keys = (self.batch, self.kv_heads, self.keys, self.head_dim)
        generator = torch.Generator().manual_seed(self.seed)
        try:
            made = self.stored or tuple(torch.randn(shape, generator=generator) for shape in (queries, keys, keys))
            return tuple(tensor.to(self.device, getattr(torch, self.dtype)) for tensor in made)
        except RuntimeError as error:  # PyTorch's word for too little memory
            reason = str(error).splitlines()[0]
            raise ValueError(f"tensors of shapes {queries} and {keys} cannot be made: {reason}") from error

    def flops(self) -> int:
        """Multiplications and additions of the two products, 4·B·H·M·N·D, half of them when causal."""
        return 4 * self.batch * self.heads * self.queries * self.keys * self.head_dim // (2 if self.causal else 1)

    def options(self) -> dict:
        """What JSON output says about the problem."""
        shown = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "stored"}
        return shown if self.stored is None else {**shown, "seed": None}

    def __str__(self):
        return " ".join(
            [
                f"B={self.batch} Hq={self.heads} Hkv={self.kv_heads} M={self.queries} N={self.keys} D={self.head_dim}",
                self.dtype,
                "causal" if self.causal else "full",
                *([f"scale={self.scale:g}"] if self.scale is not None else []),
                f"from {self.source}" if self.source else f"seed {self.seed}",
                f"on {torch.cuda.get_device_name()}" if self.device == "cuda" else "on the emulator",
            ]
        )


def _read_safetensors(path: Path, prefix: str | None) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ValueError(f"{path} is {'a directory' if path.is_dir() else 'not there'}: a safetensors file is needed")
    names = [f"{prefix}.{letter}" if prefix else letter for letter in "qkv"]
    try:
        with safe_open(path, framework="pt") as stored:
            held = sorted(stored.keys())
            missing = [name for name in names if name not in held]
            if not missing:
                return {name: stored.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    prefixes = sorted({name.rpartition(".")[0] for name in held if name.endswith(".q")} - {""})
    way_out = f"prefixes that it has: {', '.join(prefixes)}" if prefixes else f"it holds {', '.join(held) or 'nothing'}"
    raise ValueError(f"{path} has no tensor {', '.join(missing)}: {way_out}")
