"""Figures that others published, to set beside this project's: shares carry over from GPU to GPU, times do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: A repository of kernels that correspond to v00 to v04 of this ladder; what it gained from its fourth to its fifth.
PEDAGOGICAL = (
    "the pedagogical reference, fp32 kernels with the ideas of v00 to v04, at B=4, H=12, M=N=2048, D=64 on an "
    "RTX 4080, each step on top of the one before"
)


@dataclass(frozen=True)
class Effect:
    """What one decision did to the time of a kernel elsewhere."""

    change: float | None  # -0.255: 25.5 % less time; None where the source gives no figure
    source: str
    note: str = ""  # what else the source says of it


#: By the variant that takes the decision back or, as with `unroll`, takes it where the version does not.
EFFECTS: Mapping[str, Effect] = {
    "v04_vectorized:copies=scalar": Effect(-0.069, PEDAGOGICAL),
    "v04_vectorized:pad=0": Effect(-0.255, PEDAGOGICAL),
    "v04_vectorized:index=64bit": Effect(-0.291, PEDAGOGICAL),
    "v04_vectorized:unroll=all": Effect(
        None, PEDAGOGICAL, "slower: 91 registers instead of 80, so that an SM holds two blocks instead of three"
    ),
}
