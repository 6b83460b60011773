"""Questions that tables and pictures ask of the stored figures: of which GPU, of which problem, under which roofs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from flash_tutorial import model, results
from flash_tutorial.benchmark import Shape


def shape(row: Mapping[str, Any]) -> Shape | None:
    """The problem that a row was measured on; None for one with other queries than keys.

    Raises ValueError for a row that lacks part of its problem.
    """
    row = {"seq": row.get("keys"), **row}
    if row.get("queries", row["seq"]) != row["seq"]:
        return None
    try:
        return Shape.of(row)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a stored row of {row.get('version')} is damaged: {error}") from error


def problem(shape: Shape) -> str:
    """A problem in words: "float32, B=4, H=12, M=N=2048, D=64, causal"."""
    heads = f"H={shape.heads}" if shape.heads == shape.kv_heads else f"H={shape.heads} on {shape.kv_heads}"
    causal = ", causal" if shape.causal else ""
    return f"{shape.dtype}, B={shape.batch}, {heads}, M=N={shape.seq}, D={shape.head_dim}{causal}"


def short(name: str) -> str:
    """A version's or variant's name as a reader types it: v04_vectorized:pad=0 is v04:pad=0; others as they are."""
    return re.sub(r"^(v\d+)_\w+", r"\1", name)


def gpu(name: str | None) -> str | None:
    """The GPU of stored times that a name, or its file's ("h200"), means; without one, that of the newest run.

    None where nothing is stored and no name given. Raises ValueError for a name that no stored run has.
    """
    names = [run["gpu"] for run in results.runs("times")]
    if name is None:
        return names[-1] if names else None
    for known in names:
        if results.gpu_stem(name) == results.gpu_stem(known):
            return known
    stems = ", ".join(sorted({results.gpu_stem(known) for known in names})) or "none"
    raise ValueError(f"no times of a GPU {name!r} are stored: those with times are {stems}")


def is_stale(row: Mapping[str, Any]) -> bool:
    """Whether the kernel of a row has changed since it was measured, or is gone."""
    return "kernel_hash" in row and row["kernel_hash"] != results.kernel_hash(row["version"])


def common(found: Mapping[str, Collection[Shape]], *preferred: Mapping[str, Collection[Shape]]) -> Shape | None:
    """The problem that most of the names have; of several the one that most have in the first of ``preferred``, then in
    the second …, then one without mask, then the largest. None where there is none."""

    def rank(shape: Shape) -> tuple:
        counts = [sum(shape in shapes for shapes in each.values()) for each in (found, *preferred)]
        return *counts, not shape.causal, shape.flops, shape.head_dim, repr(shape)

    return max({shape for shapes in found.values() for shape in shapes}, key=rank, default=None)


@dataclass(frozen=True)
class Roofs:
    """What a GPU can do at most: byte/s of its memory and FLOP/s by dtype, and how that is known."""

    bandwidth: float
    flops: Mapping[str, float]
    known: str  # "measured 2026-11-29" or "as published"


def roofs(gpu: str, dtypes: Collection[str]) -> Roofs:
    """A GPU's ceilings: those measured last, or, if not all of these dtypes' are, its published ones.

    Raises ValueError for a GPU of which neither is known.
    """
    bandwidth, flops, dates = 0.0, {}, {}
    for run in results.runs("times"):
        measured = run.get("ceilings") or {}
        if run["gpu"] == gpu and measured.get("copy_tb_s"):
            bandwidth = measured["copy_tb_s"] * 1e12
            found = {dtype: tflops * 1e12 for dtype, tflops in measured.get("tflops", {}).items() if dtype in dtypes}
            flops |= found
            dates |= dict.fromkeys(found, run["date"][:10])
    if set(dtypes) <= set(flops):
        return Roofs(bandwidth, flops, f"measured {', '.join(sorted(set(dates.values())))}")
    for chip in model.CHIPS.values():
        if chip.name in gpu:
            flops = {dtype: chip.flops if dtype == "float32" else chip.half_flops for dtype in dtypes}
            return Roofs(chip.dram, flops, "as published")
    raise ValueError(
        f"the ceilings of {gpu} are not known: `flash-tutorial bench` measures and keeps them "
        f"(published ones are here for {', '.join(model.CHIPS)})"
    )
