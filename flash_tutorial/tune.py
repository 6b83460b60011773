"""Which tile shape of a version is the fastest on a GPU: measured by `flash-tutorial tune`, looked up at every launch.

    plan = plan_of("v09")
    run = measure(plan)                                # on a GPU; keeps each problem in results/tuning/<gpu>.json
    print(render(tables_of(run.rows, plan.tiles)))     # or of stored("v09"), without one

A version with several tile shapes has an option called "tiles", whose first word leaves the choice to the launch; the
shape of every other word has a number, from 0, that the kernel can be asked for. Without being asked it makes its own
choice (`FLASH_REGISTER_TILED` in kernels/include/flash/params.cuh), sensible on a GPU that nobody has measured.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import SEPARATING_LINE, tabulate

from flash_tutorial import benchmark, build, results
from flash_tutorial.benchmark import Contender
from flash_tutorial.clock import ROUNDS, Timing
from flash_tutorial.suites import SUITES, TOKENS, Shape, in_common
from flash_tutorial.versions import VERSIONS, Version

if TYPE_CHECKING:
    import torch

# ---------------------------------------------------------------------------------------------- looking up

OWN_CHOICE = -1  # what a kernel is asked for where nothing better is known
LEAST = 1 / 2  # of a measured problem's queries, batch and heads included: with fewer there is less to share among SMs


def choice(
    version: Version, operator: Callable, q: torch.Tensor, k: torch.Tensor, causal: bool, folder: Path | None = None
) -> int:
    """The number of the tile shape that was the fastest on q's GPU on a problem like this one; OWN_CHOICE where none is
    known, and for the emulator.

    operator  the version's, of its kernel as it is now
    q, k      (batch, heads, M, head_dim), (batch, kv_heads, N, head_dim), of a compiled head size

    A problem is alike if it has the head size and the mask; of several, one of this dtype, and then the one nearest in
    length. One that was measured before the kernel's last change, not with every tile shape, or with more than twice as
    many queries is none. A file that is damaged is warned of, once.
    """
    if not version.tiles or q.device.type == "cpu" or q.numel() == 0 or k.numel() == 0:
        return OWN_CHOICE
    gpu = _name(q.device)
    folder = results.RESULTS if folder is None else folder
    try:
        status = os.stat(_path(gpu, folder))
    except OSError:
        return OWN_CHOICE
    stamp = status.st_mtime_ns, status.st_size
    dtype = str(q.dtype).removeprefix("torch.")
    queries, keys = q.shape[0] * q.shape[1] * q.shape[2], k.shape[2]
    return _nearest(version, operator, gpu, folder, stamp, dtype, q.shape[3], causal, queries, keys)


@functools.cache
def _name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device)


@functools.cache
def _path(gpu: str, folder: Path) -> str:
    return str(results.path_of("tuning", gpu, folder))


@functools.lru_cache(maxsize=4096)  # a launch has no time to read a file
def _nearest(version, operator, gpu, folder, stamp, dtype, head_dim: int, causal: bool, queries: int, keys: int) -> int:
    alike = [
        (shape, number)
        for shape, number in _fastest(version, operator, gpu, folder, stamp)
        if (shape.head_dim, shape.causal) == (head_dim, causal) and queries >= LEAST * _queries(shape)
    ]
    alike = [each for each in alike if each[0].dtype == dtype] or alike

    def distance(each: tuple[Shape, int]) -> tuple[float, float]:
        shape, _ = each
        return abs(math.log(keys / shape.seq)), abs(math.log(queries / _queries(shape)))

    return min(alike, key=distance)[1] if alike else OWN_CHOICE


def _queries(shape: Shape) -> int:
    return shape.batch * shape.heads * shape.seq


@functools.lru_cache(maxsize=64)
def _fastest(
    version: Version, operator: Callable, gpu: str, folder: Path, stamp: tuple[int, int]
) -> list[tuple[Shape, int]]:
    """Each problem that was measured with all tile shapes of the kernel as it is now, and the fastest one's number.
    `operator` and `stamp` are other ones when the kernel or the results file have changed."""
    try:
        lines = current(version, gpu, folder)
    except (ValueError, OSError) as error:
        warnings.warn(f"{error}: until then kernels choose their tile shapes themselves", RuntimeWarning, stacklevel=2)
        return []
    return [(line.shape, version.tiles.index(line.best)) for line in lines.values() if line.best]


# ---------------------------------------------------------------------------------------------- what was measured


@dataclass(frozen=True)
class Line:
    """One problem and the rows of its tile shapes, by the word for each: see `Run` for what a row holds."""

    shape: Shape
    rows: Mapping[str, Mapping[str, Any]]

    @property
    def timed(self) -> list[str]:
        """The tile shapes that have a time: those that launch and are right."""
        return [tiles for tiles, row in self.rows.items() if "microseconds" in row]

    def microseconds(self, tiles: str | None) -> float | None:
        """Of one tile shape; None if it has no time."""
        return self.rows[tiles]["microseconds"]["median"] if tiles in self.timed else None

    def tflops(self, tiles: str | None) -> float | None:
        time = self.microseconds(tiles)
        return time and self.shape.flops / time / 1e6

    @property
    def best(self) -> str | None:
        """The fastest; None if none has a time."""
        return min(self.timed, key=self.microseconds, default=None)

    @property
    def own(self) -> str | None:
        """What the kernel chooses of its own accord; None if that is not known."""
        return next((row["own"] for row in self.rows.values()), None)

    def loss(self, tiles: str | None) -> float | None:
        """By which part of the best one's time another takes longer."""
        time = self.microseconds(tiles)
        return time and time / self.microseconds(self.best) - 1

    def noise(self, tiles: str | None) -> bool:
        """Whether another than the best is as good: takes longer by less than the larger of the two spreads."""
        return bool(self.loss(tiles)) and Timing.of(self.rows[tiles]).noise(Timing.of(self.rows[self.best]))


def current(
    version: Version, gpu: str, folder: Path | None = None, tiles: Iterable[str] | None = None
) -> dict[Shape, Line]:
    """What was measured on a GPU with a version's kernel as it is now, by problem: the newest run that has all of these
    tile shapes (None: the version's). Times of several runs are not compared.

    Raises ValueError if the file is damaged or of another format version.
    """
    now, wanted = build.source_hash(version), set(version.tiles if tiles is None else tiles)
    found: dict[Shape, Line] = {}
    for run in results.runs("tuning", folder, gpu):
        facts = {"gpu": run["gpu"], "date": run["date"], "stale": False}
        rows: dict[Shape, dict[str, dict[str, Any]]] = {}
        for row in run["rows"]:
            if (row["version"], row["kernel_hash"]) == (version.name, now):
                rows.setdefault(Shape.of(row), {})[row["tiles"]] = {**row, **facts}
        found |= {shape: Line(shape, its) for shape, its in rows.items() if wanted <= set(its)}
    return found


def stored(
    version: Version, shapes: Iterable[Shape] | None = None, gpu: str | None = None, folder: Path | None = None
) -> list[dict[str, Any]]:
    """The newest stored row of every tile shape of a version, on every problem and GPU, or of some problems, or of one
    GPU ("h200"): see `Run` and `results.newest`.

    Raises ValueError for a GPU of which nothing is stored, naming the others, and for damaged results.
    """
    wanted = None if shapes is None else set(shapes)
    return [
        row
        for row in results.newest("tuning", lambda row: (Shape.of(row), row["tiles"]), folder, gpu)
        if row["version"] == version.name and (wanted is None or Shape.of(row) in wanted)
    ]


# ---------------------------------------------------------------------------------------------- measuring

GRID = SUITES["paper"]  # what is measured unless something else is asked for: bf16, D = 64 and 128, full and causal


@dataclass(frozen=True)
class Plan:
    """What is measured: the tile shapes of a version, by their words, on each problem."""

    version: Version
    shapes: tuple[Shape, ...]
    tiles: tuple[str, ...]


def plan_of(
    version: str | os.PathLike | Version,
    *,
    tiles: Sequence[str] | None = None,
    like: str | None = None,
    **chosen: Any,
) -> Plan:
    """What is measured of a version.

    version  one with several tile shapes: a name, a variant's, or the path of a .cu file
    tiles    the words of some of them; None: all
    like     the version whose dtypes, head sizes and tile shapes a .cu has whose file name does not say
    chosen   fields of suites.Suite that are to be otherwise than GRID's, such as seqs=(512,)

    Raises ValueError for what is unknown, and for what the version does not take.
    """
    from flash_tutorial.compare import check_takes

    version = version_of(version, like)
    for word in tiles or ():
        if word not in version.tiles:
            raise ValueError(f"{version.name} has no tile shape {word!r}: it has {', '.join(version.tiles)}")
    if not {GRID.dtype, chosen.get("dtype")} & set(version.dtypes):
        chosen.setdefault("dtype", version.dtypes[0])
    shapes = dataclasses.replace(GRID, **chosen).shapes()
    for shape in shapes:
        check_takes(version, shape)
        if shape.head_dim not in version.head_dims:
            sizes = ", ".join(map(str, version.head_dims))
            raise ValueError(f"head_dim is {shape.head_dim}: {version.name} is compiled for {sizes}, and others padded")
    return Plan(version, shapes, tuple(dict.fromkeys(tiles or version.tiles)))


def version_of(name: str | os.PathLike | Version, like: str | None = None) -> Version:
    """The version with several tile shapes that a name, or the path of a .cu file, means. Raises ValueError for others,
    naming those that have several."""
    from flash_tutorial import registry

    version = registry.resolve(name, like)
    if not version.tiles:
        tuned = ", ".join(each.name for each in VERSIONS if each.tiles) or "no version yet"
        raise ValueError(f"{version.name} has one tile shape, and nothing to choose from; with several: {tuned}")
    return version


@dataclass
class Run:
    """What is known of a plan's problems once it has been measured, or interrupted.

    A row has the "version", the fields of its Shape, "tiles" (the word), "own" (the word for the kernel's own choice,
    None if not known), "kernel_hash" and, as in benchmark.Run, "error", "microseconds", "tflops", "warmup",
    "repetitions", "gpu_state", or what came instead of a time: "wrong", "failed", or "refused" if the GPU cannot launch
    it. "gpu", "date" and "stale" are as `results.newest` gives them.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    known: int = 0  # problems that had been measured before
    interrupted: bool = False
    said: list[str] = field(default_factory=list)  # what a reader should know of it beside the rows

    @property
    def right(self) -> bool:
        """Whether every tile shape that the GPU can launch is right and has a time."""
        return not any("wrong" in row or "failed" in row for row in self.rows)


def measure(
    plan: Plan,
    *,
    force: bool = False,
    warmup: int | None = None,
    repetitions: int | None = None,
    progress: bool | None = None,
    folder: Path | None = None,
) -> Run:
    """Checks and times the tile shapes of a plan, problem after problem, on the current GPU.

    A problem is kept in the results as soon as all its tile shapes have been measured, so that a run that is ended, in
    whatever way, goes on there the next time. One that has been measured with all of them, and with the kernel as it is
    now, is not measured again. What a reader's own file does is not kept: its name means nothing later.

    force                measures every problem
    warmup, repetitions  counts, kept to exactly; None: 5 and 30, and fewer where a call takes seconds
    progress             a bar on stderr; None: where stderr is a terminal

    KeyboardInterrupt ends it early, with the problems measured until then. Raises ValueError where there is no GPU, no
    Triton or a GPU that is too old, and for damaged results, OSError for a file that cannot be written, and BuildError
    if the kernel does not compile.
    """
    from tqdm import tqdm

    from flash_tutorial import registry

    version = plan.version
    _check_gpu(version)
    environment = results.environment()
    gpu = environment["name"]
    lasting = results.kernel_hash(version.name) == build.source_hash(version)
    if lasting:
        results.check("tuning", gpu, folder)
    registry.operator(version, "cuda")

    before = {} if force else current(version, gpu, folder, plan.tiles)
    known = [shape for shape in plan.shapes if shape in before]
    missing = [shape for shape in plan.shapes if shape not in known]
    run, kept = Run(known=len(known)), None
    run.rows = [before[shape].rows[tiles] for shape in known for tiles in plan.tiles]
    contenders = [_contender(version, tiles) for tiles in plan.tiles]
    steps = len(missing) * len(contenders) * (1 + ROUNDS)
    with tqdm(total=steps, leave=False, disable=None if progress is None else not progress) as bar:
        try:
            for shape in missing:
                times = benchmark.Run(environment=environment)
                benchmark.measure_problem(times, shape, contenders, warmup, repetitions, bar)
                own = _own_choice(version, shape)
                rows = [_row(version, own, row) for row in times.rows]
                lasts = [row for row in rows if "failed" not in row]
                if lasting and lasts:
                    kept = results.append("tuning", lasts, where=environment, folder=folder)
                date = datetime.now(UTC).isoformat(timespec="seconds")
                run.rows += [{**row, "gpu": gpu, "date": date, "stale": False} for row in rows]
        except KeyboardInterrupt:
            run.interrupted = True
            run.said.append("interrupted: these are the problems that were done; the same command goes on from here")
    if known:
        run.said.append(f"{len(known)} of {len(plan.shapes)} problems were measured before: --force measures them anew")
    if kept:
        run.said.append(f"kept in {kept}")
    if missing and not lasting:
        run.said.append(f"not kept: {version.label} is a file of your own, whose name means nothing later")
    return run


def _check_gpu(version: Version) -> None:
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            f"tuning needs a CUDA GPU, and torch {torch.__version__} sees none: `flash-tutorial tune --stored` shows "
            "what is in results/tuning/"
        )
    benchmark.check_gpu()
    found = torch.cuda.get_device_capability()
    if found < build.capability(version.min_arch):
        raise ValueError(
            f"{version.name} needs a GPU of compute capability {version.min_arch} or later; "
            f"{torch.cuda.get_device_name()} has {found[0]}.{found[1]}"
        )


def _contender(version: Version, tiles: str) -> Contender:
    number = version.tiles.index(tiles)
    return Contender(tiles, tiles, "", lambda *inputs: _call(version, number, *inputs)[:2], version=version)


def _call(version: Version, number: int, q, k, v, causal: bool):
    """out, lse and the number of the tile shape taken, which is another only if OWN_CHOICE is asked for."""
    from flash_tutorial import registry

    return registry.operator(version, "cuda")(q, k, v, causal, 1 / math.sqrt(q.shape[3]), number)


def _own_choice(version: Version, shape: Shape) -> str | None:
    """The word for the tile shape that the kernel takes of its own accord."""
    import torch

    sizes = [(shape.batch, heads, shape.seq, shape.head_dim) for heads in (shape.heads, shape.kv_heads)]
    try:
        q, k = (torch.empty(size, device="cuda", dtype=getattr(torch, shape.dtype)) for size in sizes)
        *_, number = _call(version, OWN_CHOICE, q, k, k, shape.causal)
    except RuntimeError:  # it cannot launch, or nothing can any more: then there is nothing to compare with
        return None
    return version.tiles[number] if 0 <= number < len(version.tiles) else None


#: What kernels/include/flash/launch.cuh says, in CUDA's words, of a block that the GPU has no room for. Other words
#: there are of what an earlier kernel did.
_REFUSED = re.compile(
    "a block of .+ bytes of shared memory: (invalid (configuration )?argument|too many resources requested for launch)"
)


def _row(version: Version, own: str | None, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as it is kept, of one that `benchmark.measure_problem` made: its contender is a tile shape."""
    made = {**row, "version": version.name, "tiles": row["version"], "own": own}
    if refused := _REFUSED.search(row.get("failed", "")):
        del made["failed"]
        made["refused"] = refused[0]
    return made


# ---------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class Table:
    """The lines of one family of problems on one GPU, by length, and the tile shapes that are its columns: those that
    were measured."""

    gpu: str
    lines: tuple[Line, ...]
    tiles: tuple[str, ...]

    @property
    def problem(self) -> str:
        """What the lines' problems have in common: "bfloat16, B·N=16,384, H=32, D=64, full"."""
        return in_common([line.shape for line in self.lines])

    def wins(self, tiles: str) -> list[int]:
        """The lengths at which no other tile shape is faster than one by more than the spread."""
        return [line.shape.seq for line in self.lines if tiles == line.best or line.noise(tiles)]

    def mean(self, tiles: Callable[[Line], str | None]) -> float | None:
        """The harmonic mean over the lengths of the TFLOP/s of the tile shape that `tiles` names for each."""
        found = [line.tflops(tiles(line)) for line in self.lines]
        return statistics.harmonic_mean(found) if all(found) else None


def tables_of(rows: Iterable[Mapping[str, Any]], tiles: Sequence[str]) -> list[Table]:
    """A table for each GPU and family of the rows that differ in length only; the columns are those of `tiles` that the
    family has rows of."""
    by_shape: dict[tuple[str, Shape], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if row["tiles"] in tiles:
            by_shape.setdefault((row["gpu"], Shape.of(row)), {})[row["tiles"]] = row
    families: dict[tuple, list[Line]] = {}
    for (gpu, shape), found in by_shape.items():
        families.setdefault((gpu, shape.family, _tokens(shape)), []).append(Line(shape, found))
    return [
        Table(
            gpu,
            tuple(sorted(lines, key=lambda line: line.shape.seq)),
            tuple(each for each in tiles if any(each in line.rows for line in lines)),
        )
        for (gpu, *_), lines in sorted(families.items())
    ]


def _tokens(shape: Shape) -> tuple[bool, int]:
    """What lines of one table have in common of their batch sizes: the tokens that GRID has, or the batch size."""
    tokens = shape.batch * shape.seq
    return (True, tokens) if tokens == TOKENS else (False, shape.batch)


FORMATS = ("simple", "github", "json")


def render(tables: Sequence[Table], format: str = "simple") -> str:
    """Tables as text: "simple" (for a terminal), "github" (Markdown) or "json"."""
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}: accepted are {', '.join(FORMATS)}")
    if format == "json":
        return json.dumps([_plain(table) for table in tables], indent=2, ensure_ascii=False)
    end = "  \n" if format == "github" else "\n"
    parts = []
    for table in tables:
        parts += [
            end.join(_caption(table, format)),
            _table(table, format),
            *(["\n".join(notes)] if (notes := _notes(table)) else []),
        ]
    return "\n\n".join(parts)


def _caption(table: Table, format: str) -> list[str]:
    rows = [row for line in table.lines for row in line.rows.values()]
    dates = ", ".join(sorted({row["date"][:10] for row in rows}))
    best = "bold" if format == "github" else "*"
    lines = [
        f"{table.problem} on {table.gpu}, measured {dates}",
        f"TFLOP/s by tile shape; {best}: the best; ~: as good, the difference is within the spread (noise)",
        "own: what the kernel takes where nobody has measured; loses: time more than the best one's",
    ]
    if any(len({row["date"] for row in line.rows.values()}) > 1 for line in table.lines):
        lines.append("measured in several runs: a difference between two of them carries the drift of the GPU")
    if any(row["stale"] for row in rows):
        lines.append("N*: stale, measured before the kernel's last change; the kernel chooses itself until it is again")
    return lines


def _table(table: Table, format: str) -> str:
    headers = ["N", *table.tiles, "own", "loses"]
    cells: list[list[str] | str] = []
    for line in table.lines:
        stale = "*" * any(row["stale"] for row in line.rows.values())
        loses = _loses(line.loss(line.own), line.noise(line.own))
        speeds = (_marked(line.tflops(each), each == line.best, line.noise(each), format) for each in table.tiles)
        words = (_missing(line.rows.get(each)) for each in table.tiles)
        shown = (speed or word for speed, word in zip(speeds, words, strict=True))
        cells.append([f"{line.shape.seq}{stale}", *shown, line.own or "-", loses])
    if len(table.lines) > 1:
        means = {each: table.mean(lambda line, each=each: each) for each in table.tiles}
        best = max((each for each in means if means[each]), key=means.get, default=None)
        own, ideal = table.mean(lambda line: line.own), table.mean(lambda line: line.best)
        shown = (_marked(means[each], each == best, False, format) or "-" for each in table.tiles)
        cells += [SEPARATING_LINE] * (format == "simple")
        cells.append(["h. mean", *shown, _marked(own, False, False, format) or "-", _loses(own and ideal / own - 1)])
    return tabulate(cells, headers, tablefmt=format, disable_numparse=True, colalign=["right"] * len(headers))


def _marked(tflops: float | None, best: bool, noise: bool, format: str) -> str:
    """A speed, and in front of it, where a column's figures stay in line, what it is."""
    if tflops is None:
        return ""
    text = f"{tflops:.1f}"
    if best:
        return f"**{text}**" if format == "github" else f"* {text}"
    return f"~ {text}" if noise else text


def _missing(row: Mapping[str, Any] | None) -> str:
    """What stands in the place of a time."""
    found = (kind for kind in ("refused", "wrong", "failed") if row and kind in row)
    return {"refused": "no launch"}.get(kind := next(found, "-"), kind)


def _loses(loss: float | None, noise: bool = False) -> str:
    return "-" if loss is None else "noise" if noise else f"{100 * loss:.1f} %"


def _notes(table: Table) -> list[str]:
    """Why tile shapes have no time, each reason once, with the lengths that it holds for."""
    lengths: dict[tuple[str, str], list[int]] = {}
    for line in table.lines:
        for tiles, row in line.rows.items():
            for kind, verb in (("refused", "does not launch"), ("wrong", "is wrong"), ("failed", "failed")):
                if kind in row:
                    lengths.setdefault((f"{tiles} {verb}", row[kind]), []).append(line.shape.seq)
    return [f"{what} at N={', '.join(map(str, at))}: {why}" for (what, why), at in lengths.items()]


def _plain(table: Table) -> dict[str, Any]:
    """A table as plain data."""
    return {
        "gpu": table.gpu,
        "problem": table.problem,
        "lines": [
            {
                **dataclasses.asdict(line.shape),
                "best": line.best,
                "own": line.own,
                "own_loses": line.loss(line.own),
                "tiles": {
                    tiles: {
                        "tflops": line.tflops(tiles),
                        "noise": line.noise(tiles),
                        **{name: row[name] for name in _KEPT if name in row},
                    }
                    for tiles, row in line.rows.items()
                },
            }
            for line in table.lines
        ],
    }


_KEPT = ("microseconds", "error", "warmup", "repetitions", "refused", "wrong", "failed", "stale", "date")
