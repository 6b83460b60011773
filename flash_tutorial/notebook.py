"""What every notebook says the same way: source excerpts, diffs, tables, figures, predictions and what came of them.

A notebook's prose is Markdown; where a sentence needs a number, the number is computed in a cell and the sentence
shown with `say`. Source is always shown from the file itself, found by its text, so that an excerpt can neither go
stale nor be missing unnoticed: if a kernel changes under a notebook, the excerpt's function raises.
"""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from IPython.display import display
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import load_file
from tabulate import tabulate

import flash_tutorial as ft
from flash_tutorial import ablation as ablation_module
from flash_tutorial import benchmark, emulator, model, plots, reference, registry, suites
from flash_tutorial import diff as diff_module
from flash_tutorial import hardware as hardware_module
from flash_tutorial import inspect as inspect_module

ROOT = Path(__file__).resolve().parent.parent
REAL_INPUT = ROOT / "tests" / "data" / "minilm_qkv.safetensors"

emulator.PROGRESS_BAR_AFTER = 60.0  # a bar would be saved with the notebook, frame by frame

#: The counters that most tables show, and what to call them there.
GLOBAL = {
    "global_load_requests": "global load requests",
    "global_load_sectors": "global load sectors",
    "global_store_requests": "global store requests",
    "global_store_sectors": "global store sectors",
}
SHARED = {
    "shared_load_requests": "shared load requests",
    "shared_load_wavefronts": "shared load wavefronts",
    "shared_load_conflicts": "  of them bank conflicts",
    "shared_store_requests": "shared store requests",
    "shared_store_wavefronts": "shared store wavefronts",
    "shared_store_conflicts": "  of them bank conflicts",
}
TENSOR = {
    "mma": "mma instructions",
    "ldmatrix": "ldmatrix instructions",
    "cp_async": "cp.async instructions",
    "cp_async_wavefronts": "  their wavefronts, writing shared memory",
}
SYNCHRONISATION = {"barriers": "block barriers (per warp)", "syncwarps": "warp barriers", "shuffles": "shuffles"}


# --- showing --------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Shows Markdown: the notebook's prose wherever a sentence carries a computed number."""
    display({"text/markdown": text, "text/plain": text}, raw=True)


def table(
    rows: Iterable[Sequence] | Iterable[Mapping], headers: Sequence[str] | str = "keys", align: Sequence[str] = ()
) -> None:
    """Shows a Markdown table; numbers are grouped by thousands and aligned right."""
    rows = list(rows)
    if rows and isinstance(rows[0], Mapping):
        headers = list(rows[0]) if headers == "keys" else headers
        rows = [list(row.values()) for row in rows]
    cells = [[number(cell) for cell in row] for row in rows]
    if not align:
        align = ["right" if rows and isinstance(cell, int | float) else "left" for cell in (rows[0] if rows else ())]
    say(tabulate(cells, headers, tablefmt="github", colalign=align or None, disable_numparse=True))


def number(value) -> str:
    """A number as the notebooks write it: whole numbers grouped, others to three digits, anything else as it is."""
    if value is None:
        return "—"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int | np.integer) or (isinstance(value, float) and value.is_integer() and abs(value) >= 1000):
        return f"{int(value):,}"
    if isinstance(value, float | np.floating):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def figure(picture: Figure, alt: str) -> None:
    """Shows a figure with its alternative text, which is also its caption: what there is to see in it, in words."""
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png", dpi=150)
    image = Image.open(buffer).convert("RGB").quantize(48, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    small = io.BytesIO()
    image.save(small, format="png", optimize=True)
    width = round(picture.get_size_inches()[0] * 96)
    display(
        {"image/png": small.getvalue(), "text/plain": f"[figure] {alt}"},
        raw=True,
        metadata={"image/png": {"alt": alt, "width": width}},
    )
    say(f"*{alt}*")


def code(text: str, language: str = "cpp", title: str = "") -> None:
    """Shows source text as a fenced block, with a line above it that says what it is."""
    lines = "\n".join(line.rstrip() for line in text.rstrip().splitlines())
    fence = f"```{language}\n{lines}\n```"
    say(f"{title}\n\n{fence}" if title else fence)


# --- source ---------------------------------------------------------------------------------------------------------


def _find(lines: list[str], anchor: str, path: Path, start: int = 0) -> int:
    found = [index for index in range(start, len(lines)) if anchor in lines[index]]
    if len(found) != 1 and not start:
        where = f"on lines {[index + 1 for index in found]}" if found else "nowhere"
        raise ValueError(f"{path.name}: the excerpt's first line must contain {anchor!r} exactly once; it is {where}")
    if not found:
        raise ValueError(f"{path.name}: no line after {start} contains {anchor!r}")
    return found[0]


def excerpt(version: str | Path, first: str, last: str | None = None) -> tuple[str, int, int]:
    """Part of a kernel's file: its text, and the numbers of its first and last line.

    It starts at the one line that contains ``first``, with the comment right above it, and ends with the first line
    after it that contains ``last``; without ``last``, where the brace that the line opens is closed again, or before
    the next blank line if it opens none.
    """
    named = isinstance(version, str) and not version.endswith(".cu")
    path = registry.resolve(version).source if named else Path(version)
    lines = path.read_text().splitlines()
    begin = end = _find(lines, first, path)
    if last is not None:
        end = _find(lines, last, path, begin + 1)
    else:
        depth, opened = 0, False
        for end in range(begin, len(lines)):
            bare = re.sub(r'"[^"]*"|\'.\'|//.*', "", lines[end])
            depth += bare.count("{") - bare.count("}")
            opened = opened or "{" in bare
            if (opened and depth <= 0) or (not opened and end + 1 < len(lines) and not lines[end + 1].strip()):
                break
    while begin and lines[begin - 1].lstrip().startswith(("//", "template", "///")):
        begin -= 1
    text = lines[begin : end + 1]
    indent = min((len(line) - len(line.lstrip()) for line in text if line.strip()), default=0)
    return "\n".join(line[indent:] for line in text), begin + 1, end + 1


def source(version: str, first: str, last: str | None = None) -> None:
    """Shows a part of a version's kernel, from the file itself; see `excerpt` for what ``first`` and ``last`` mean."""
    text, begin, end = excerpt(version, first, last)
    code(text, title=f"`{ft.version(version).source.name}`, lines {begin}–{end}")


def diff(version: str) -> None:
    """Shows what a version changed from its parent, folded if it is long."""
    change = diff_module.diff(version)
    block = "```diff\n" + "\n".join(change.lines[2:]) + "\n```"
    if change.added + change.removed > 60:
        block = f"<details><summary>{change.summary}</summary>\n\n{block}\n\n</details>"
    else:
        block = f"{change.summary}\n\n{block}"
    say(block)


# --- running --------------------------------------------------------------------------------------------------------


def normal(batch=1, heads=2, queries=256, keys=None, head_dim=64, kv_heads=None, seed=0, dtype=torch.float32):
    """Random normal q, k, v on the CPU; ``keys`` defaults to ``queries`` and ``kv_heads`` to ``heads``.

    Unused memory follows each, so that a kernel which reads past its end meets bytes of no tensor, whatever lies next.
    """
    keys = queries if keys is None else keys
    kv_heads = heads if kv_heads is None else kv_heads
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        count = math.prod(shape)
        return torch.randn(count + 65536, generator=generator).to(dtype)[:count].view(shape)

    kv = (batch, kv_heads, keys, head_dim)
    return draw(batch, heads, queries, head_dim), draw(*kv), draw(*kv)


def precision(version: str | Path) -> str:
    """The dtype in which notebooks count and time a version: float32, or bfloat16 where it does not take that."""
    return "float32" if version in reference.REFERENCES or "float32" in _dtypes(version) else "bfloat16"


def _dtypes(version: str | Path) -> tuple[str, ...]:
    return registry.resolve(version).dtypes


def real(layer: int = 0, dtype=torch.float32):
    """q, k, v and the output of one attention layer of a real model, all-MiniLM-L6-v2: 12 heads, 127 tokens, D = 32."""
    tensors = load_file(REAL_INPUT)
    return tuple(tensors[f"layer{layer}.{name}"].to(dtype) for name in ("q", "k", "v", "out"))


def check(version: str | Path, q, k, v, **options) -> reference.Check:
    """Runs a version and holds its output and lse against float64."""
    out, lse = ft.attention(q, k, v, version=version, return_lse=True, **options)
    return reference.check(out, lse, q, k, v, **options)


def checks(version: str, cases: Mapping[str, tuple]) -> None:
    """Shows a table of correctness, on the emulator and, where there is one, on the GPU.

    ``cases`` maps a description to (q, k, v) or (q, k, v, options).
    """
    rows = []
    for device in ("cpu", *["cuda"] * torch.cuda.is_available()):
        for description, (q, k, v, *options) in cases.items():
            result = check(version, *(x.to(device) for x in (q, k, v)), **(options[0] if options else {}))
            errors = [f"{value:.1e}" for value in (result.error, result.pytorch_error, result.limit)]
            where = "emulator" if device == "cpu" else torch.cuda.get_device_name()
            rows.append([description, where, *errors, "yes" if result.ok else "**no**"])
    headers = ["input", "ran on", "largest error", "PyTorch's", "limit", "within"]
    table(rows, headers, ["left", "left", "right", "right", "right", "left"])


@functools.cache
def measured(
    version: str,
    queries: int = 256,
    keys: int | None = None,
    batch: int = 1,
    heads: int = 2,
    head_dim: int = 64,
    causal: bool = False,
) -> emulator.Report:
    """The emulator's report of one instrumented run on random input; the same question is asked only once."""
    q, k, v = normal(batch, heads, queries, keys, head_dim, dtype=getattr(torch, precision(version)))
    with emulator.instrument() as report:
        ft.attention(q, k, v, version=version, causal=causal)
    return report


def counters(columns: Mapping[str, emulator.Counters], names: Mapping[str, str]) -> None:
    """Shows counters side by side: a row for each of ``names`` (a field: what to call it), a column for each run."""
    rows = [[text, *(getattr(counted, name) for counted in columns.values())] for name, text in names.items()]
    table(rows, ["counter", *columns], ["left", *["right"] * len(columns)])


def by_line(report: emulator.Report, names: Mapping[str, str], top: int = 8) -> None:
    """Shows the source lines where the counters ``names`` are largest, summed over them, with the lines themselves."""
    lines = [line for line in report.lines if any(getattr(line.counters, name) for name in names)]
    lines.sort(key=lambda line: -sum(getattr(line.counters, name) for name in names))
    rows = [
        [
            f"{Path(line.file).name}:{line.line}",
            *(getattr(line.counters, name) for name in names),
            f"`{line.text.strip()}`",
        ]
        for line in lines[:top]
    ]
    table(rows, ["line", *names.values(), "source"], ["left", *["right"] * len(names), "left"])


def storage(version: str, boxes: Sequence[Mapping], alt: str) -> None:
    """Shows what a version keeps where (see `plots.storage`), with D = 64.

    Raises ValueError if the boxes in shared memory do not add up to what the kernel is launched with.
    """
    drawn = sum(box["bytes"] for box in boxes if box["memory"] == "shared")
    launched = measured(version).launches[0].shared_bytes
    if drawn != launched:
        raise ValueError(f"{version}: the boxes in shared memory make {drawn:,} bytes, the kernel takes {launched:,}")
    figure(plots.storage(boxes), alt)


SHARED_WAVEFRONTS = ("shared_load_wavefronts", "shared_store_wavefronts", "cp_async_wavefronts")


@functools.cache
def at_length(version: str, counter: str, length: int, head_dim: int = 64) -> int:
    """One counter per head at a length too long for the emulator, exactly: see `model.quadratic`."""
    samples = [(n, getattr(measured(version, n, heads=1, head_dim=head_dim).totals, counter)) for n in (128, 256, 384)]
    return model.quadratic(samples, length)


# --- the ladder, predictions, bounds --------------------------------------------------------------------------------


def stored(
    version: str, seq: int = 2048, head_dim: int = 64, causal: bool = False, dtype: str | None = None
) -> Mapping | None:
    """The measured row of a version, or of a PyTorch reference, at B=4, H=12, as results/ has it, or None.

    Without ``dtype`` it is that of `precision`.
    """
    name = version if version in reference.REFERENCES else registry.resolve(version).name
    problem = benchmark.Shape(4, 12, seq, head_dim, dtype or precision(version), causal)
    rows = (row for row in benchmark.stored() if row["version"] == name and "microseconds" in row)
    return next((row for row in rows if benchmark.Shape.of(row) == problem), None)


def times(*versions: str, lengths: Sequence[int] = (512, 1024, 2048)) -> None:
    """Shows the times that results/ holds, and measures them here too if there is a GPU.

    Each version in its own precision, and beside them PyTorch's fused attention in that of the last.
    """
    contenders = {ft.version(version).name: precision(version) for version in versions}
    last = precision(versions[-1])
    contenders["sdpa_efficient" if last == "float32" else "sdpa_flash"] = last
    rows = []
    for name, dtype in contenders.items():
        kept = [stored(name, n, dtype=dtype) for n in lengths]
        label = next((stored_label(row) for row in kept if row), None)
        if label:
            rows.append([name, dtype, label, *(row and row["microseconds"]["median"] for row in kept)])
    if torch.cuda.is_available():
        for dtype in dict.fromkeys(contenders.values()):
            names = [name for name in contenders if contenders[name] == dtype]
            plan = benchmark.plan_of(names, "pedagogical", only=True, dtype=dtype, seqs=tuple(lengths))
            here = benchmark.measure(plan, progress=False).rows
            medians = {(row["version"], row["seq"]): row.get("microseconds", {}).get("median") for row in here}
            where = f"{torch.cuda.get_device_name()}, now"
            rows += [[name, dtype, where, *(medians.get((name, n)) for n in lengths)] for name in names]
    if rows:
        say("Microseconds at B=4, H=12, D=64, without mask (median):")
        headers = ["version", "dtype", "measured on", *(f"N={n}" for n in lengths)]
        table(rows, headers, ["left", "left", "left", *["right"] * len(lengths)])
    else:
        command = f"bench {' '.join(versions)} --suite pedagogical --dtype {last} --only"
        say(f"`results/` holds no times at B=4, H=12, D=64: `flash-tutorial {command}` on a GPU adds them.")


def speeds(*names: str, suite: str = "blog") -> None:
    """Shows the TFLOP/s that results/ holds of versions and PyTorch's references over the lengths of a suite."""
    shapes = suites.find(suite).shapes()
    kept = {(row["version"], benchmark.Shape.of(row)): row for row in benchmark.stored() if "microseconds" in row}
    rows = []
    for name in (name if name in reference.REFERENCES else registry.resolve(name).name for name in names):
        own = [kept.get((name, shape)) for shape in shapes]
        label = next((stored_label(row) for row in own if row), None)
        if label:
            rows.append([name, label, *(row and float(row["tflops"]) for row in own)])
    if not rows:
        say(f"`results/` holds no speeds: `flash-tutorial bench {' '.join(names)} --suite {suite}` on a GPU adds them.")
        return
    say(f"TFLOP/s, {suites.in_common(shapes)}:")
    headers = ["version", "measured on", *(f"N={shape.seq}" for shape in shapes)]
    table(rows, headers, ["left", "left", *["right"] * len(shapes)])


def stored_label(row: Mapping) -> str:
    """Whose figure a stored row is: the GPU, the day it was measured, and whether the kernel has changed since."""
    return f"{row['gpu']}, {row['date'][:10]}{', before the kernel was last edited' if row['stale'] else ''}"


def ladder(version: str) -> None:
    """Shows the ladder up to a version: what the emulator counts for each, and the GPU times that results/ holds."""
    this = ft.version(version)
    steps = [step for step in ft.versions() if step.number <= this.number]
    times = {step.name: stored(step.name) for step in steps}
    measured_on: dict[str, list[str]] = {}  # label → versions
    for name, row in times.items():
        if row:
            measured_on.setdefault(stored_label(row), []).append(name[:3])
    rows = []
    for step in steps:
        totals = measured(step.name).totals
        mark = "**" if step is this else ""
        row = {
            "version": f"{mark}{step.name}{mark}",
            "what it is": step.title,
            "global sectors": totals.global_load_sectors + totals.global_store_sectors,
            "shared wavefronts": totals.shared_load_wavefronts + totals.shared_store_wavefronts,
            "barriers": totals.barriers,
        }
        if measured_on:
            row["µs"] = times[step.name] and times[step.name]["microseconds"]["median"]
            row["TFLOP/s"] = times[step.name] and times[step.name]["tflops"]
        rows.append(row)
    align = ["left", "left", *["right"] * (len(rows[0]) - 2)]
    table(rows, align=align)
    counted = "Sectors, wavefronts and barriers: counted by the emulator at B=1, H=2, M=N=256, D=64."
    if precision(version) != "float32":
        counted += f" From v05 on in {precision(version)}, which halves the bytes of q, k, v and out."
    if len(measured_on) > 1:
        label = "; ".join(f"{', '.join(names)}: {label}" for label, names in measured_on.items())
        say(f"{counted} Times, at B=4, H=12, M=N=2048, D=64: {label}.")
    elif measured_on:
        say(f"{counted} Times: {next(iter(measured_on))}, B=4, H=12, M=N=2048, D=64.")
    else:
        say(f"{counted} `flash-tutorial bench --suite pedagogical` on a GPU adds times.")


def verdict(version: str, bound: Mapping[str, float], chip: str = "H200") -> None:
    """Says how long a version takes beside its parent and beside the longest of its ``bounds`` on ``chip``.

    The times are those in results/, at B=4, H=12, M=N=2048, D=64.
    """
    parent = ft.version(version).parent
    row, old = stored(version), stored(parent) if parent else None
    if not row:
        say("How long it takes at B=4, H=12, M=N=2048, D=64 is not known yet: `results/` holds no time of that.")
        return
    time, spread = row["microseconds"]["median"], [round(row["microseconds"][p]) for p in ("p20", "p80")]
    text = (
        f"Measured ({stored_label(row)}, B=4, H=12, M=N=2048, D=64): {version} takes **{time:,.0f} µs** (20th to 80th "
        f"percentile {spread[0]:,} to {spread[1]:,})."
    )
    if old:
        before = old["microseconds"]["median"]
        ratio = f"{before / time:.2f} times as fast" if time < before else f"{time / before:.2f} times as slow"
        other = f" in {old['dtype']}" if old["dtype"] != row["dtype"] else ""
        text += f" {parent} takes {before:,.0f} µs{other}: this version is **{ratio}**."
    if chip in row["gpu"]:
        longest = max(bound, key=bound.__getitem__)
        text += (
            f" The longest of the bounds, {longest}, is {bound[longest]:,.0f} µs; the time is "
            f"{time / bound[longest]:.1f} times that. What lies between is latency that too few warps hide"
            f"{'' if 'instructions' in bound else ', and instructions that no bound counts'}."
        )
    say(text)


def ablation(version: str) -> None:
    """Shows what each decision of a version is worth: its variants' times that results/ holds, beside its own."""
    say(ablation_module.of(version).markdown())


def hardware(version: str) -> None:
    """Shows the emulator's counters of a version beside those of a GPU, as results/ holds them."""
    rows = hardware_module.stored(hardware_module.calls([version]), say=lambda _: None)
    if rows:
        gpus = " and ".join(sorted({f"{row['gpu']}, {row['date'][:10]}" for row in rows}))
        say(f"Counted by the emulator and by Nsight Compute ({gpus}):\n\n{hardware_module.describe(rows, 'github')}")
    else:
        say("`results/` holds no counters of a GPU for this version: `flash-tutorial hardware` on one adds them.")


@dataclass(frozen=True)
class Prediction:
    """What a change should do to one quantity: from ``before`` (the parent's, if any) to ``after``."""

    quantity: str
    before: float | None
    after: float
    reason: str


def predict(predictions: Sequence[Prediction]) -> None:
    """Shows predictions, before anything is measured."""
    columns = {
        "quantity": [p.quantity for p in predictions],
        "parent, measured": [p.before for p in predictions],
        "predicted": [p.after for p in predictions],
        "because": [p.reason for p in predictions],
    }
    _columns(columns)


def outcome(predictions: Sequence[Prediction], measured: Sequence[float]) -> None:
    """Shows the same predictions beside what was measured, in the same order."""

    def verdict(predicted: float, value: float) -> str:
        if value == predicted:
            return "nothing"
        return f"{value / predicted - 1:+.1%}" if predicted else f"{value:+,}"

    columns = {
        "quantity": [p.quantity for p in predictions],
        "parent": [p.before for p in predictions],
        "predicted": [p.after for p in predictions],
        "measured": list(measured),
        "off by": [verdict(p.after, value) for p, value in zip(predictions, measured, strict=True)],
    }
    _columns(columns)


def _columns(columns: Mapping[str, Sequence]) -> None:
    """Shows a table given by columns; one that has nothing to say, as a parent's where there is none, is left out."""
    columns = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    words = ("quantity", "because", "off by")
    table(
        zip(*columns.values(), strict=True), list(columns), ["left" if name in words else "right" for name in columns]
    )


def inspected(version: str, head_dim: int = 64, arch: str = "sm_90") -> tuple[inspect_module.Kernel, ...]:
    """What nvcc makes of each of a version's kernels, in launch order; empty where there is no nvcc."""
    return _inspected(version, head_dim, arch)


@functools.cache
def _inspected(version: str, head_dim: int, arch: str) -> tuple[inspect_module.Kernel, ...]:
    try:
        return inspect_module.inspect(registry.resolve(version), arch, head_dim).kernels
    except ValueError:
        return ()


def registers(version: str, head_dim: int = 64, arch: str = "sm_90") -> Mapping[str, int]:
    """Registers per thread of each of a version's kernels as ptxas reports them; empty where there is no nvcc."""
    return {re.sub(r"<.*", "", kernel.name): kernel.registers for kernel in inspected(version, head_dim, arch)}


def loop(
    version: str, skipped: Sequence[tuple[str, str | None]] = (), head_dim: int = 64
) -> tuple[inspect_module.Instruction, ...]:
    """The instructions that a warp executes each time round the longest loop of a version's one kernel, on an H200.

    ``skipped`` names parts of the source that it jumps over, each by its first and last line as `excerpt` does. The
    compiler mixes the instructions of neighbouring lines, so what remains is exact to a few. Empty where nvcc or
    nvdisasm is missing.
    """
    kernels = inspected(version, head_dim)
    sass = kernels[0].sass if kernels else None
    if not sass:
        return ()
    labels = {each.label: place for place, each in enumerate(sass) if each.label}
    ends = [(place, re.search(r"BRA\b.*?(\.L_\w+)", each.text)) for place, each in enumerate(sass)]
    loops = [(labels[to[1]], place) for place, to in ends if to and labels[to[1]] < place]
    first, last = max(loops, key=lambda found: found[1] - found[0])
    parts = [excerpt(version, *part)[1:] for part in skipped]
    own = [each for each in sass[first : last + 1] if not any(begin <= each.line <= end for begin, end in parts)]
    return tuple(own)


def resources(*versions: str, head_dim: int = 64, chip: str = "H200") -> None:
    """Shows threads, shared memory, registers and occupancy of each kernel that the versions launch."""
    gpu = model.CHIPS[chip]
    rows = []
    for version in versions:
        used = registers(version, head_dim, gpu.arch)
        for launch in measured(version, 128, head_dim=head_dim).launches:
            name = re.sub(r"<.*", "", launch.kernel)
            threads = int(np.prod(launch.block))
            limits = model.occupancy(gpu, threads=threads, shared_bytes=launch.shared_bytes, registers=used.get(name))
            rows.append(
                {
                    "version": version,
                    "kernel": name,
                    "threads": threads,
                    "shared bytes": launch.shared_bytes,
                    "registers": used.get(name),
                    "blocks per SM": limits.blocks,
                    "limited by": limits.limiter,
                    "occupancy": f"{limits.share:.0%}",
                }
            )
    table(rows, align=["left", "left", *["right"] * 4, "left", "right"])


def bounds(
    version: str,
    batch: int = 4,
    heads: int = 12,
    length: int = 2048,
    head_dim: int = 64,
    chip: str = "H200",
    extra_bytes: int = 0,
) -> dict[str, float]:
    """Microseconds that each resource of a chip needs at least (see `model.lower_bounds`), without causal mask.

    Compulsory memory traffic is q, k, v and out once each, plus ``extra_bytes``. What cp.async writes into shared
    memory counts as wavefronts there, too.
    """

    def total(counter: str) -> int:
        return batch * heads * at_length(version, counter, length, head_dim)

    blocks = [
        (n, max(launch.blocks_total for launch in measured(version, n, heads=1, head_dim=head_dim).launches))
        for n in (128, 256, 384)
    ]
    seconds = model.lower_bounds(
        model.CHIPS[chip],
        flops=model.attention_flops(batch, heads, length, length, head_dim),
        shared_wavefronts=sum(map(total, SHARED_WAVEFRONTS)),
        sectors=total("global_load_sectors") + total("global_store_sectors"),
        dram_bytes=4 * batch * heads * length * head_dim * _itemsize(version) + extra_bytes,
        blocks=batch * heads * model.quadratic(blocks, length),
        half=precision(version) != "float32",
        exponentials=batch * heads * length * length,
    )
    return {resource: 1e6 * value for resource, value in seconds.items()}


def _itemsize(version: str) -> int:
    return getattr(torch, precision(version)).itemsize


def bounds_figure(bars: Mapping[str, Mapping[str, float]], alt: str, chip: str = "H200") -> None:
    """Shows versions' lower bounds and, where results/ has them, measured times, at B=4, H=12, M=N=2048, D=64."""
    groups = {}
    for version, resources in bars.items():
        row = stored(version)
        measured = {f"measured ({stored_label(row)})": row["microseconds"]["median"]} if row else {}
        groups[version] = {**resources, **measured}
    figure(plots.bars(groups, unit=f"µs at least, by the {chip}'s published rates (logarithmic)", log=True), alt)


def roofline(
    versions: Sequence[str], alt: str, chip: str = "H200", extra_bytes: Mapping[str, int] | None = None
) -> None:
    """Shows where versions lie under the roofs of a chip's memory and shared memory, at B=4, H=12, M=N=2048, D=64.

    Traffic with memory is what is compulsory, plus a version's ``extra_bytes``; that with shared memory is counted,
    128 bytes for each wavefront. The performance is that in results/, where there is one.
    """
    gpu, heads, length, head_dim = model.CHIPS[chip], 48, 2048, 64
    flops = model.attention_flops(1, heads, length, length, head_dim)
    known = {"float32": ("FP32", gpu.flops), "bfloat16": ("tensor cores", gpu.half_flops)}
    memory, shared, ceilings = {}, {}, {}
    for version in versions:
        row = stored(version)
        achieved = row["tflops"] * 1e12 if row else None
        ceiling, ceilings[ceiling] = known[precision(version)]
        traffic = 4 * heads * length * head_dim * _itemsize(version) + (extra_bytes or {}).get(version, 0)
        common = {"achieved": achieved, "ceiling": ceiling}
        memory[version[:3]] = {"intensity": flops / traffic, **common}
        wavefronts = sum(at_length(version, counter, length) for counter in SHARED_WAVEFRONTS)
        if wavefronts:
            shared[version[:3]] = {"intensity": flops / (heads * wavefronts * 128), **common}
    panels = {"memory": (gpu.dram, memory)}
    if shared:
        panels["shared memory"] = (gpu.sms * gpu.l1_bytes * gpu.clock, shared)
    figure(plots.roofline(panels, ceilings=ceilings, roof=gpu.name), alt)


# --- breaking things ------------------------------------------------------------------------------------------------


def explanation(error: emulator.KernelFinding, findings: int = 1) -> str:
    """What the emulator says about a broken kernel, its first findings, with files by name rather than by path."""
    text = "\n".join(str(finding) for finding in error.findings[:findings])
    return re.sub(r"[^\s:(]*/([^\s/:]+\.\w+:\d+)", r"\1", text)


def broken(version: str, changes: Mapping[str, str], q, k, v, show: bool = True, **options) -> str:
    """Changes a scratch copy of a kernel, runs it instrumented and shows the change, with ``show``, and what happens.

    Returns the kind of the first finding, or ``"wrong"`` or ``"right"`` by the output where the emulator has none.
    """
    path = ft.edit(version, changes)
    if show:
        code("\n".join(diff_module.diff(path, version).lines[2:]), "diff", "The change:")
    try:
        with emulator.instrument():
            result = check(path, q, k, v, **options)
    except emulator.KernelFinding as error:
        code(explanation(error), "text", "The emulator:")
        return error.findings[0].kind
    verdict = "right" if result.ok else "wrong"
    figures = f"largest error {result.error:.1e}, limit {result.limit:.1e}"
    say(f"The emulator has no objection; the result is **{verdict}**: {figures}.")
    return verdict
