"""Times of versions and PyTorch's own kernels, side by side on one GPU, kept in ``results/<gpu>.json``.

    python -m flash_tutorial.benchmark                    # every version and SDPA, the pedagogical shapes
    python -m flash_tutorial.benchmark v03 v04 sdpa --seq-lens 512,2048

All contenders of one problem run in one process on the same tensors, in alternation, with the L2 cache flushed before
every repetition (``triton.testing.do_bench``), each as a captured CUDA graph, so that what Python takes to launch a
short kernel is no part of its time. A contender is first checked against float64; a wrong one gets no time.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

RESULTS = Path(__file__).resolve().parent.parent / "results"
FORMAT = 1
ROUNDS = 3  # alternations of all contenders; their spread shows drift of the clock


@dataclass(frozen=True)
class Shape:
    """One self-attention problem: ``q (batch, heads, seq, head_dim)``, ``k`` and ``v`` alike."""

    batch: int
    heads: int
    seq: int
    head_dim: int
    dtype: str = "float32"
    causal: bool = False

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products, 4·B·H·M·N·D, halved when causal."""
        full = 4 * self.batch * self.heads * self.seq**2 * self.head_dim
        return full // 2 if self.causal else full


PEDAGOGICAL = tuple(Shape(4, 12, seq, 64) for seq in (512, 1024, 2048))


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median of all repetitions and the percentiles around it."""

    median: float
    p20: float
    p80: float


def measure(functions: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, Timing]:
    """Microseconds on the current GPU of what each function launches, the functions taking turns ``rounds`` times.

    Raises RuntimeError where Triton, whose ``do_bench`` does the timing, is not installed.
    """
    try:
        from triton.testing import do_bench
    except ImportError as error:
        raise RuntimeError(
            "timing needs Triton's do_bench; CUDA builds of torch for Linux bring it (pip install triton)"
        ) from error
    import numpy

    milliseconds: dict[str, list[float]] = {name: [] for name in functions}
    replays = {name: _captured(function) for name, function in functions.items()}
    for _ in range(rounds):
        for name, replay in replays.items():
            milliseconds[name] += do_bench(replay, warmup=50, rep=150, return_mode="all")
    return {
        name: Timing(*(round(float(x) * 1e3, 3) for x in numpy.percentile(times, (50, 20, 80))))
        for name, times in milliseconds.items()
    }


def _captured(function: Callable[[], object]) -> Callable[[], None]:
    """A CUDA graph's replay of what `function` launches; it has been called before, so nothing is built or loaded."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def environment() -> dict[str, str]:
    """What a figure depends on beside the kernel: GPU, clocks and power as found, driver, toolkit, libraries."""
    import torch

    fields = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "power.limit", "pstate")
    query = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", "0"],
        capture_output=True,
        text=True,
    )
    values = [value.strip() for value in query.stdout.strip().split(",")] if query.returncode == 0 else []
    return {
        **dict(zip(fields, values, strict=False)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "cudnn": str(torch.backends.cudnn.version()),
    }


def gpu_stem(name: str) -> str:
    """The results file's stem for a GPU: ``NVIDIA H200`` gives ``h200``."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower().removeprefix("nvidia ").removeprefix("geforce ")).strip("_")


def run(names: Iterable[str], shapes: Iterable[Shape], progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """One row a contender and shape: its error against float64 and, where that is within the limit, its time.

    ``names`` are versions (by any name) or PyTorch references (see ``reference.REFERENCES``).
    """
    import torch

    from flash_tutorial import build, ops, reference, versions

    rows: list[dict[str, Any]] = []
    for shape in shapes:
        generator = torch.Generator("cuda").manual_seed(0)
        size = (shape.batch, shape.heads, shape.seq, shape.head_dim)
        q, k, v = (
            torch.randn(size, generator=generator, device="cuda", dtype=getattr(torch, shape.dtype)) for _ in range(3)
        )
        expected, _ = reference.attention_float64(q, k, v, causal=shape.causal)
        limit = reference.limit(q, k, v, causal=shape.causal, expected=expected)
        functions: dict[str, Callable[[], object]] = {}
        at = len(rows)
        for name in names:
            is_reference = name in reference.REFERENCES
            if is_reference:
                function = lambda name=name: reference.REFERENCES[name](q, k, v, causal=shape.causal)  # noqa: E731
            else:
                version = versions.find(name)
                function = lambda version=version: ops.attention(q, k, v, version=version.name, causal=shape.causal)  # noqa: E731
            error = (function().double() - expected).abs().max().item()
            row: dict[str, Any] = {"version": name if is_reference else version.name, **asdict(shape), "error": error}
            if not is_reference:
                row["kernel_hash"] = build.source_hash(version)
            rows.append(row)
            if is_reference or error <= limit:
                functions[row["version"]] = function
            else:
                row["wrong"] = f"error {error:.2e} exceeds {limit:.2e}"
        del expected
        for name, timing in measure(functions).items():
            row = next(row for row in rows[at:] if row["version"] == name)
            row["microseconds"] = asdict(timing)
            row["tflops"] = round(shape.flops / timing.median / 1e6, 2)
            progress(f"N={shape.seq:<6} {name:20} {timing.median:12.1f} µs {row['tflops']:8.2f} TFLOP/s")
    return rows


def save(rows: list[dict[str, Any]], folder: Path = RESULTS) -> Path:
    """Adds one dated run to this GPU's results file, atomically, and returns the file's path.

    Raises ValueError, leaving the file as it was, if it is damaged or of another format version.
    """
    where = environment()
    path = folder / f"{gpu_stem(where['name'])}.json"
    document = _read(path) if path.exists() else {"format": FORMAT, "gpu": where["name"], "runs": []}
    document["runs"].append(
        {"date": datetime.now(UTC).isoformat(timespec="seconds"), "environment": where, "rows": rows}
    )
    folder.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as file:
        json.dump(document, file, indent=1)
        file.write("\n")
    os.replace(file.name, path)
    return path


def load_results(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The newest row of every contender, shape and GPU, each with its ``gpu`` and ``date``; [] where there are none.

    A row whose kernel has changed since it was measured has ``stale`` true.
    """
    from flash_tutorial import build, versions

    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        document = _read(path)
        for measured in document["runs"]:
            for row in measured["rows"]:
                key = (document["gpu"], row["version"], *(row[field] for field in Shape.__dataclass_fields__))
                newest[key] = {**row, "gpu": document["gpu"], "date": measured["date"]}
    current = {version.name: build.source_hash(version) for version in versions.VERSIONS}
    for row in newest.values():
        row["stale"] = "kernel_hash" in row and row["kernel_hash"] != current.get(row["version"])
    return list(newest.values())


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); mend or remove it") from error
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path} has results format {found!r}; this version reads format {FORMAT}")
    return document


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--seq-lens", default="512,1024,2048", show_default=True, help="Comma-separated lengths N = M.")
@click.option("--batch-size", default=4, show_default=True)
@click.option("--num-heads", default=12, show_default=True)
@click.option("--head-dim", default=64, show_default=True)
@click.option("--causal", is_flag=True)
@click.option("--save/--no-save", "keep", default=True, help="Add the figures to results/<gpu>.json.")
def main(
    names: tuple[str, ...], seq_lens: str, batch_size: int, num_heads: int, head_dim: int, causal: bool, keep: bool
) -> None:
    import torch

    from flash_tutorial import versions

    if not torch.cuda.is_available():
        raise click.UsageError(
            "a benchmark needs a GPU; on a CPU `flash-tutorial compare` shows the emulator's counters"
        )
    shapes = [Shape(batch_size, num_heads, int(seq), head_dim, causal=causal) for seq in seq_lens.split(",")]
    every = (*(version.name for version in versions.VERSIONS), "baseline", "sdpa_efficient", "sdpa_math")
    rows = run(names or every, shapes, progress=click.echo)
    if keep:
        click.echo(f"saved in {save(rows)}")


if __name__ == "__main__":
    main()
