"""The problems that times are measured on, one by one or as a grid that has a name.

suites.find("paper").shapes()        # 24 problems in bfloat16
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Shape:
    """One self-attention problem: q (batch, heads, seq, head_dim), k and v (batch, kv_heads, seq, head_dim).

    Raises ValueError naming the field, what came and what is accepted.
    """

    batch: int
    heads: int
    seq: int
    head_dim: int
    dtype: str = "float32"
    causal: bool = False
    kv_heads: int | None = None  # None: as many as heads

    def __post_init__(self):
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        for name in ("batch", "heads", "seq", "head_dim", "kv_heads"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}: it has to be a whole number, 1 or more")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads} and kv_heads {self.kv_heads}: heads has to be a multiple of it")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}: accepted are {', '.join(DTYPES)}")

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Shape:
        """The problem that a stored row was measured on. Raises ValueError for a row that lacks part of it."""
        try:
            return cls(**{each.name: row[each.name] for each in dataclasses.fields(cls) if each.name in row})
        except (TypeError, ValueError) as error:
            raise ValueError(f"a stored row of {row.get('version')} is damaged: {error}") from error

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products, 4·B·H·M·N·D, halved when causal."""
        full = 4 * self.batch * self.heads * self.seq**2 * self.head_dim
        return full // 2 if self.causal else full

    @property
    def family(self) -> tuple:
        """What problems share that differ in length, and with it in batch size, only."""
        return self.dtype, self.head_dim, self.causal, self.heads, self.kv_heads

    @property
    def brief(self) -> str:
        """What tells a suite's families apart: "D=64 causal"."""
        return f"D={self.head_dim} {'causal' if self.causal else 'full'}"

    def __str__(self):
        """ "float32, B=4, H=12, M=N=2048, D=64, causal"."""
        causal = ", causal" if self.causal else ""
        return f"{self.dtype}, B={self.batch}, {self._heads}, M=N={self.seq}, D={self.head_dim}{causal}"

    @property
    def _heads(self) -> str:
        return f"H={self.heads}" + (f" on {self.kv_heads}" if self.kv_heads != self.heads else "")


def in_common(family: Collection[Shape]) -> str:
    """What the problems of a family share, in words: "float32, B=4, H=12, D=64, full"."""
    shape, batches = next(iter(family)), {each.batch for each in family}
    constant = all(each.batch * each.seq == TOKENS for each in family)
    batch = f"B={shape.batch}" if len(batches) == 1 else f"B·N={TOKENS:,}" if constant else "B varies"
    return f"{shape.dtype}, {batch}, {shape._heads}, D={shape.head_dim}, {'causal' if shape.causal else 'full'}"


def most_common(found: Mapping[str, Collection[Shape]], *preferred: Mapping[str, Collection[Shape]]) -> Shape | None:
    """The problem that most of the names have; of several the one that most have in the first of ``preferred``, then in
    the second …, then one without mask, then the largest. None where there is none."""

    def rank(shape: Shape) -> tuple:
        counts = [sum(shape in shapes for shapes in each.values()) for each in (found, *preferred)]
        return *counts, not shape.causal, shape.flops, shape.head_dim, repr(shape)

    return max({shape for shapes in found.values() for shape in shapes}, key=rank, default=None)


TOKENS, WIDTH = 16384, 2048  # of a suite without batch sizes: B·N, and without heads: H·D


@dataclass(frozen=True)
class Suite:
    """A grid of problems. What is None follows from the rest: the batch size from B·N = 16,384, the heads from
    H·D = 2,048, and the dtype from the versions."""

    seqs: tuple[int, ...]
    head_dims: tuple[int, ...] = (64,)
    causals: tuple[bool, ...] = (False,)
    dtype: str | None = None
    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None

    def shapes(self, dtypes: Sequence[str] = DTYPES) -> tuple[Shape, ...]:
        """The problems, those of equal length last to vary. `dtypes` are used where the suite has none of its own.

        Raises ValueError where B·N or H·D cannot be kept.
        """
        return tuple(
            Shape(self._batch(seq), self._heads(head_dim), seq, head_dim, dtype, causal, self.kv_heads)
            for dtype in ([self.dtype] if self.dtype else dtypes)
            for head_dim in self.head_dims
            for causal in self.causals
            for seq in self.seqs
        )

    def __str__(self):
        """ "bfloat16, B·N=16,384, H·D=2,048, D=64 and 128, full and causal, N=512 to 16,384"."""
        return ", ".join(
            [
                self.dtype or "each version's first dtype",
                f"B={self.batch}" if self.batch else f"B·N={TOKENS:,}",
                f"H={self.heads}" if self.heads else f"H·D={WIDTH:,}",
                f"D={' and '.join(map(str, self.head_dims))}",
                " and ".join("causal" if causal else "full" for causal in self.causals),
                f"N={self.seqs[0]} to {self.seqs[-1]:,}",
            ]
        )

    def _batch(self, seq: int) -> int:
        return _share(self.batch, TOKENS, "batch size times length", f"length {seq}", seq, "--batch-size")

    def _heads(self, head_dim: int) -> int:
        return _share(self.heads, WIDTH, "heads times head_dim", f"head_dim {head_dim}", head_dim, "--num-heads")


def _share(given: int | None, total: int, product: str, factor: str, size: int, option: str) -> int:
    if given is not None:
        return given
    if size < 1 or total % size:
        raise ValueError(f"{factor} does not divide {total:,}, which {product} is in this suite: say {option} too")
    return total // size


_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
SUITES = {
    "small": Suite((512, 1024), batch=1, heads=16),
    "pedagogical": Suite((512, 1024, 2048), dtype="float32", batch=4, heads=12),
    "article": Suite(_LENGTHS[:-1], (128,), (True,), dtype="float16", batch=1, heads=32),
    "blog": Suite(_LENGTHS, (128,), dtype="bfloat16"),
    "paper": Suite(_LENGTHS, (64, 128), (False, True), dtype="bfloat16"),
}


def find(name: str) -> Suite:
    """The suite of a name. Raises ValueError for an unknown one, with the names that there are."""
    if name not in SUITES:
        near = difflib.get_close_matches(name, SUITES)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"unknown suite {name!r}: {hint}There are {', '.join(SUITES)}")
    return SUITES[name]
