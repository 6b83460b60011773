"""Pictures of the stored figures: where versions lie under a GPU's roofs, and how fast contenders are over the length.

Nothing here measures, and no GPU is needed. A picture carries a digest of all that it shows, in the file that it is
written to as well, so that a file is known to be current without being drawn again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_tutorial import benchmark, model, registry, results, suites
from flash_tutorial.files import replacing
from flash_tutorial.suites import Shape
from flash_tutorial.versions import VERSIONS, Version

SUFFIXES = (".svg", ".png")


class NothingStored(ValueError):
    """Figures that a picture needs have not been measured: the message says what measures them."""


ARITHMETIC = {"float32": "FP32", "float16": "FP16 tensor cores", "bfloat16": "BF16 tensor cores"}


@dataclass(frozen=True)
class Picture:
    """What is drawn, in words, and as plain data for the function of `plots` that draws it."""

    kind: str  # the function's name
    data: Mapping[str, Any]  # its arguments, as JSON has them
    alt: str
    missing: tuple[str, ...] = ()  # the versions left out because nothing is stored of them

    @property
    def digest(self) -> str:
        """A hash of all that is shown."""
        text = json.dumps([self.kind, self.data, self.alt], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def figure(self):
        """The matplotlib figure. Raises ModuleNotFoundError where matplotlib is not installed."""
        from flash_tutorial import plots

        return getattr(plots, self.kind)(**self.data)

    def write(self, path: Path) -> None:
        """Writes the picture to a .svg or .png, which holds its digest; the same figures give the same bytes.

        All of it or, whatever happens, what was there before. Raises ValueError for another suffix.
        """
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{path} ends in {path.suffix or 'no suffix'!r}: accepted are {', '.join(SUFFIXES)}")
        figure = self.figure()
        import matplotlib

        metadata = {"Title": self.alt, "Description": f"{_MARK}{self.digest}"}
        metadata |= {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
        with replacing(path) as draft, matplotlib.rc_context({"svg.hashsalt": self.digest}):
            figure.savefig(draft, format=path.suffix[1:], dpi=150, metadata=metadata)


_MARK = "figures: "


def digest_of(path: Path) -> str | None:
    """The digest of the figures that a written picture shows; None if there is no such file, or none in it."""
    if not path.is_file():
        return None
    _, found, rest = path.read_bytes().partition(_MARK.encode())
    return rest[:16].decode("ascii", "replace") if found else None


# ---------------------------------------------------------------------------------------------- what is stored


def _by_version(
    rows: Iterable[dict[str, Any]], gpu: str | None, *fields: str
) -> dict[str, dict[Shape, dict[str, Any]]]:
    """The rows of a GPU that have all the fields, by version and problem."""
    found: dict[str, dict[Shape, dict[str, Any]]] = {}
    for row in rows:
        shape = _shape(row)
        if row["gpu"] == gpu and shape and all(row.get(field) is not None for field in fields):
            found.setdefault(row["version"], {})[shape] = row
    return found


def _shape(row: Mapping[str, Any]) -> Shape | None:
    """The problem that a row was measured on; None for one with other queries than keys, which a profile may have."""
    row = {"seq": row.get("keys"), **row}
    return Shape.of(row) if row.get("queries", row["seq"]) == row["seq"] else None


def _asked(
    names: Iterable[str],
    versions: Iterable[Version] = VERSIONS,
    references: Iterable[str] = (),
    others: Iterable[str] = (),
) -> dict[str, bool]:
    """What names mean, as rows call it, and whether it was named itself; none, or "all", is every one of the versions
    and of the references that have times, `others` being those that have none.

    Raises ValueError for an unknown name.
    """
    asked: dict[str, bool] = {}
    for name in list(names) or ["all"]:
        if name == "all":
            asked = {**dict.fromkeys([*(version.name for version in versions), *references], False), **asked}
        elif name in references or name in others:
            asked[name] = True
        else:
            try:
                asked[registry.resolve(name).label] = True
            except ValueError as error:
                also = f"; references with times are {', '.join(references)}" if references else ""
                raise ValueError(f"{error}{also}") from error
    return asked


def _left_out(asked: Mapping[str, bool], shown: Iterable[str], gpu: str | None, options: str = "") -> tuple[str, ...]:
    """What of the asked is not shown. Raises NothingStored if that was named itself, or nothing is shown."""
    shown = set(shown)
    missing = [registry.short(name) for name in asked if name not in shown]
    named = [registry.short(name) for name, itself in asked.items() if itself and name not in shown]
    if named or not shown:
        where = f"of {gpu} " if gpu else ""
        raise NothingStored(
            f"no figures {where}are stored of {', '.join(named or missing)}: on a GPU "
            f"`flash-tutorial bench {' '.join(named or ['all'])}{options}` measures and keeps them"
        )
    return tuple(missing)


def _list(labels: Sequence[str]) -> str:
    """Names in a row, neighbours on the ladder as a range: v00–v04, v06:layout=row."""
    places = {registry.short(version.name): version.number for version in VERSIONS}
    runs: list[list[str]] = []
    for label in labels:
        if runs and label in places and places.get(runs[-1][-1]) == places[label] - 1:
            runs[-1].append(label)
        else:
            runs.append([label])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


# ---------------------------------------------------------------------------------------------- roofline


@dataclass(frozen=True)
class Roofs:
    """What a GPU can do at most: byte/s of its memory and FLOP/s by dtype, and how that is known."""

    bandwidth: float
    flops: Mapping[str, float]
    known: str  # "measured 2026-11-29" or "as published"


def _roofs(gpu: str, dtypes: Collection[str]) -> Roofs:
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


def roofline(names: Iterable[str] = (), gpu: str | None = None) -> Picture:
    """Performance against FLOP per byte of DRAM, one point a version, under the ceilings of a GPU.

    names  versions and variants; none, or "all": every version that something is stored of
    gpu    by name or by that of its file in results/; None: the one measured last

    Each version is shown at one problem, as many as possible at the same. Time is the stored median or, where only a
    profile is stored, the profile's. Bytes are those that Nsight Compute measured or, where no profile is stored,
    counted, see `counted_bytes`. Ceilings are the measured ones or, where none are stored, those published.

    Raises ValueError for an unknown name or GPU, for a named version without stored figures (with the command that
    measures them), and for damaged results.
    """
    asked = _asked(names)
    gpu = results.find_gpu("times", gpu)
    times = _by_version(benchmark.stored(), gpu, "microseconds")
    profiles = results.newest("profiles", _shape)
    profiles = _by_version(profiles, gpu, "duration_us", "dram_read_bytes", "dram_write_bytes")
    chosen = _problems(asked, times, profiles)
    missing = _left_out(asked, chosen, gpu)
    roofs = _roofs(gpu, sorted({shape.dtype for shape in chosen.values()}))

    points: dict[str, dict[str, Any]] = {}
    counted, untimed, stale = [], [], []
    for name, shape in chosen.items():
        label = registry.short(name)
        time, profile = times.get(name, {}).get(shape), profiles.get(name, {}).get(shape)
        microseconds = time["microseconds"]["median"] if time else profile["duration_us"]
        moved = profile["dram_read_bytes"] + profile["dram_write_bytes"] if profile else counted_bytes(name, shape)
        counted += [label] * (not profile)
        untimed += [label] * (not time)
        stale += [label] * any(row and row["stale"] for row in (time, profile))
        points[label] = {
            "intensity": shape.flops / moved,
            "achieved": shape.flops / microseconds * 1e6,
            "ceiling": ARITHMETIC[shape.dtype],
            "counted": not profile,
        }

    notes = [f"Ceilings: {roofs.known}"]
    for shape in dict.fromkeys(chosen.values()):
        who = [registry.short(name) for name, its in chosen.items() if its == shape]
        notes.append(f"{_list(who)}: {shape}")
    if len(counted) < len(points):
        notes.append("Dots: bytes measured by Nsight Compute")
    if counted:
        notes.append("Rings: bytes counted, inputs and outputs once, whatever else is written out and back")
    if untimed:
        notes.append(f"Timed under Nsight Compute only: {_list(untimed)}")
    if stale:
        notes.append(f"Measured before the kernel's last change: {_list(stale)}")
    ceilings = {ARITHMETIC[dtype]: flops for dtype, flops in roofs.flops.items()}
    data = {
        "panels": {"DRAM": [roofs.bandwidth, points]},
        "ceilings": ceilings,
        "roof": gpu,
        "notes": notes,
    }
    roof = [f"{flops / 1e12:.3g} TFLOP/s ({name})" for name, flops in ceilings.items()]
    where = [
        f"{label} at {point['achieved'] / 1e12:.3g} TFLOP/s and {point['intensity']:,.0f} FLOP/byte"
        for label, point in points.items()
    ]
    roof.append(f"{roofs.bandwidth / 1e12:.3g} TB/s")
    alt = f"Roofline of {gpu}; ceilings {roofs.known}: {', '.join(roof)}. Versions: {', '.join(where)}."
    return Picture("roofline", data, alt, missing)


def _problems(
    names: Iterable[str], times: Mapping[str, Collection[Shape]], profiles: Mapping[str, Collection[Shape]]
) -> dict[str, Shape]:
    """A problem for each name that has any: the one that most have, preferably with both a time and a profile, or at
    least a time; for the rest the one that most of them have …"""
    timed = {name: set(times.get(name, ())) for name in names}
    both = {name: shapes.intersection(profiles.get(name, ())) for name, shapes in timed.items()}
    left = {name: shapes.union(profiles.get(name, ())) for name, shapes in timed.items()}
    chosen: dict[str, Shape] = {}
    while any(left.values()):
        shape = suites.most_common(left, *({name: each[name] for name in left} for each in (both, timed)))
        chosen |= {name: shape for name, shapes in left.items() if shape in shapes}
        left = {name: shapes for name, shapes in left.items() if name not in chosen}
    return {name: chosen[name] for name in names if name in chosen}


def counted_bytes(name: str, shape: Shape) -> int:
    """Bytes that a call moves to and from DRAM if the caches keep all that it reads again: its inputs and outputs once,
    and what else it writes to global memory twice, out and back.

    What it writes is counted by the emulator at three short lengths, which determine it at every length.
    """
    from flash_tutorial import emulator, ops
    from flash_tutorial.problem import Problem
    from flash_tutorial.profile import compulsory_bytes

    def problem(batch: int, heads: int, kv_heads: int, length: int) -> Problem:
        sizes = {"queries": length, "keys": length, "head_dim": shape.head_dim}
        return Problem(batch, heads, kv_heads, **sizes, dtype=shape.dtype, causal=shape.causal)

    def written(length: int) -> int:
        with emulator.instrument() as report:
            ops.attention(*problem(1, 1, 1, length).tensors(), version=name, causal=shape.causal)
        return report.totals.global_store_bytes

    a_head = model.quadratic([(length, written(length)) for length in (128, 256, 384)], shape.seq)
    read, outputs = compulsory_bytes(problem(shape.batch, shape.heads, shape.kv_heads, shape.seq))
    return read + outputs + 2 * (shape.batch * shape.heads * a_head - outputs)


# ---------------------------------------------------------------------------------------------- speed over the length


def speeds(names: Iterable[str] = (), suite: str = "pedagogical", gpu: str | None = None) -> Picture:
    """TFLOP/s over the length, with the spread from the 20th to the 80th percentile, one panel a family of problems.

    names  versions, variants and references ("sdpa_flash"); none, or "all": every version and reference that has times
    suite  whose problems: `suites.SUITES`
    gpu    by name or by that of its file in results/; None: the one measured last

    Raises ValueError for an unknown name, suite or GPU, for a named contender without stored times (with the command
    that measures them), and for damaged results.
    """
    from flash_tutorial.reference import PEERS, REFERENCES

    grid = suites.find(suite).shapes()
    gpu = results.find_gpu("times", gpu)
    every = _by_version(benchmark.stored(), gpu, "microseconds")
    times = {name: {shape: row for shape, row in rows.items() if shape in grid} for name, rows in every.items()}
    # What has no kernel of ours has no hash of one.
    references = [
        name for name, rows in times.items() if rows and not any("kernel_hash" in row for row in rows.values())
    ]
    dtypes = {shape.dtype for shape in grid}
    versions = [version for version in VERSIONS if dtypes.intersection(version.dtypes)]
    asked = _asked(names, versions, references, {**REFERENCES, **PEERS})
    shown = [name for name in asked if times.get(name)]
    missing = _left_out(asked, shown, gpu, f" --suite {suite}")

    panels: dict[str, dict[str, Any]] = {}
    families: dict[tuple, list[Shape]] = {}
    for shape in sorted(grid, key=lambda shape: shape.seq):
        families.setdefault(shape.family, []).append(shape)
    for shapes in families.values():
        lines = {}
        for name in shown:
            rows = [times[name][shape] for shape in shapes if shape in times[name]]
            if rows:
                lines[registry.short(name)] = {
                    "lengths": [row["seq"] for row in rows],
                    **{
                        bound: [round(Shape.of(row).flops / row["microseconds"][quantile] / 1e6, 4) for row in rows]
                        for bound, quantile in (("median", "median"), ("low", "p80"), ("high", "p20"))
                    },
                    "stale": [row["stale"] for row in rows],
                    "reference": name in references,
                }
        if lines:
            panels[suites.in_common(shapes)] = lines

    notes = [f"{gpu}, suite {suite}. Bands: 20th to 80th percentile. Dashed: PyTorch and other packages"]
    stale = [registry.short(name) for name in shown if any(row["stale"] for row in times[name].values())]
    if stale:
        notes.append(f"Hollow, measured before the kernel's last change: {_list(stale)}")
    ends = [
        f"{title}: "
        + ", ".join(f"{name} {line['median'][-1]:.3g} (N={line['lengths'][-1]:,})" for name, line in lines.items())
        for title, lines in panels.items()
    ]
    alt = f"TFLOP/s over the sequence length on {gpu}, at the right end of each line: {'; '.join(ends)}."
    return Picture("speeds", {"panels": panels, "notes": notes}, alt, missing)
