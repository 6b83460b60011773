"""Times of versions, PyTorch's own kernels and other packages', side by side on one GPU: `flash-tutorial bench`.

    plan = plan_of(["v03", "v04", "v04:pad=0"], suite="pedagogical")
    run = measure(plan)                                # on a GPU
    save(run)                                          # adds it to results/<gpu>.json
    tables = timetable.tables_of(run.shown(), plan.contenders, plan.baseline)
    print(timetable.render(tables))                    # or of stored rows, without a GPU: stored(plan)

All contenders of one problem run in one process on the same random normal tensors, in turns: see clock.py. Each is
first held against float64 on these tensors; one that is wrong gets no time. What the GPU reaches at most, with a matrix
product and a copy, is measured in the same run.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flash_tutorial import results, suites
from flash_tutorial.suites import DTYPES, Shape
from flash_tutorial.versions import VERSIONS, Version

# ---------------------------------------------------------------------------------------------- who takes part


NAMED, ALL, BESIDE = "named", "all", "beside"  # asked for by name, as one of all, or run beside as a yardstick
YARDSTICKS = ("baseline", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math")


@dataclass(frozen=True)
class Contender:
    """Who takes part: a version, a variant, a reader's .cu, one of PyTorch's kernels or another package's.

    run(q, k, v, causal) -> (out, lse), where all but versions give no lse (None).
    """

    name: str
    title: str
    idea: str
    run: Callable
    origin: str = NAMED
    version: Version | None = None

    def takes(self, shape: Shape) -> bool:
        """Whether it is made for the problem's dtype and head size; what is no version is taken to be."""
        version = self.version
        return version is None or (shape.dtype in version.dtypes and shape.head_dim <= max(version.head_dims))


@dataclass(frozen=True)
class Plan:
    """What is measured, or looked up: who, on what, and against whom. `left_out`: who is not, and why."""

    contenders: tuple[Contender, ...]
    shapes: tuple[Shape, ...]
    baseline: str
    left_out: dict[str, str] = field(default_factory=dict)


def plan_of(
    names: Iterable[str | Path] = (),
    suite: str = "small",
    *,
    baseline: str | None = None,
    only: bool = False,
    like: str | None = None,
    peers: Iterable[str] | None = None,
    **chosen: Any,
) -> Plan:
    """Who is measured on what.

    names     versions, variants, paths of .cu files, PyTorch's kernels and other packages' (`reference.REFERENCES` and
              PEERS), "all" for every version that takes the problems; none: all
    suite     a grid of problems, one of `suites.SUITES`
    baseline  what the others are compared with; None: "baseline", explicit PyTorch, or without it the first
    only      without the yardsticks that otherwise run beside
    like      the version whose dtypes and head sizes a .cu has whose file name does not say
    peers     the packages among the yardsticks; None: those installed here
    chosen    fields of Suite that are to be otherwise, such as seqs=(512,)

    Raises ValueError for what is unknown, comes twice, or is not taken by a contender that is asked for by name.
    """
    problems = dataclasses.replace(suites.find(suite), **chosen)
    from flash_tutorial.compare import check_takes

    found = _contenders(names, baseline, only, like, peers)
    dtypes = dict.fromkeys(each.version.dtypes[0] for each in found if each.version) or DTYPES[:1]
    shapes = problems.shapes(tuple(dtypes))

    left_out = {}
    for each in found:
        if not any(map(each.takes, shapes)):
            if each.origin == NAMED:
                check_takes(each.version, shapes[0])
            left_out[each.name] = f"takes {', '.join(each.version.dtypes)}, head_dim 1 to {max(each.version.head_dims)}"
    taking = tuple(each for each in found if each.name not in left_out)
    if any(each.version for each in found) and not any(each.version for each in taking):
        raise ValueError(f"no version takes {shapes[0].dtype} with head_dim {shapes[0].head_dim}")
    chosen_baseline = next((each.name for each in taking if each.name == "baseline"), taking[0].name)
    return Plan(taking, shapes, _label(baseline, like) if baseline else chosen_baseline, left_out)


def _contenders(names, baseline, only, like, peers) -> list[Contender]:
    from flash_tutorial.reference import PEERS

    found: dict[str, Contender] = {}

    def add(contender: Contender) -> None:
        if contender.name in found:
            raise ValueError(f"{contender.name} comes twice: every contender makes one row, under a name of its own")
        found[contender.name] = contender

    for name in map(str, list(names) or ["all"]):
        if name == "all":
            for version in VERSIONS:
                add(_contender(version.name, ALL))
        else:
            add(_contender(name, NAMED, like))
    if baseline and (label := _label(baseline, like)) not in found:
        found[label] = _contender(baseline, NAMED, like)
    if not only:
        installed = [name for name, peer in PEERS.items() if peer.installed] if peers is None else peers
        for name in (*YARDSTICKS, *installed):
            found.setdefault(name, _contender(name, BESIDE))
    return list(found.values())


def _contender(name: str, origin: str, like: str | None = None) -> Contender:
    from flash_tutorial.compare import find_version
    from flash_tutorial.reference import PEERS, REFERENCES

    others = {**REFERENCES, **PEERS}
    if name in others:
        other = others[name]
        return Contender(name, other.title, "", lambda q, k, v, causal: (other(q, k, v, causal), None), origin)
    try:
        version = find_version(name, like)
    except ValueError as error:
        if "unknown version" not in str(error):
            raise
        if near := difflib.get_close_matches(name, others, cutoff=0.75):
            raise ValueError(f"unknown name {name!r}: did you mean {' or '.join(near)}?") from error
        raise ValueError(f"{error}; other packages' are {', '.join(PEERS)}") from error
    run = functools.partial(_run_version, version)
    return Contender(version.label, version.title, version.idea, run, origin, version)


def _run_version(version: Version, q, k, v, causal: bool):
    from flash_tutorial import ops

    return ops.attention(q, k, v, version=version, causal=causal, return_lse=True)


def _label(name: str, like: str | None) -> str:
    return _contender(name, NAMED, like).name


# ---------------------------------------------------------------------------------------------- measuring

PATIENCE = 10.0  # seconds that the repetitions of a slow contender may take, unless their number is asked for
LEAST = 3  # repetitions
TOO_SLOW = 3.0  # seconds of a call that is timed only if the number of repetitions is asked for


@dataclass
class Run:
    """What was measured: rows as they are stored, those that failed beside them, and what the GPU reaches at most.

    A row has a "version", the fields of its Shape, "error" (the largest distance from float64), and for a version
    "kernel_hash"; if it is right "microseconds" {median, p20, p80}, "tflops", "warmup" and "repetitions" (counts) and
    "gpu_state"; "wrong" if it is not, "failed" if there is no result, each saying why.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    ceilings: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def shown(self) -> list[dict[str, Any]]:
        """The rows with what `results.rows` adds to stored ones."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        facts = {"gpu": self.environment["name"], "date": date}
        run = {**facts, "environment": self.environment, "ceilings": self.ceilings}
        return [{**row, **facts, "run": run, "stale": False} for row in self.rows]


def check_gpu() -> None:
    """Raises ValueError where nothing can be timed, saying what can be done instead."""
    import torch

    from flash_tutorial import clock

    if not torch.cuda.is_available():
        raise ValueError(
            f"a benchmark needs a CUDA GPU, and torch {torch.__version__} sees none: `flash-tutorial bench --stored` "
            "shows the times in results/, `flash-tutorial compare` the emulator's counters"
        )
    try:
        clock.do_bench()
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def measure(
    plan: Plan, *, warmup: int | None = None, repetitions: int | None = None, progress: bool | None = None
) -> Run:
    """Checks and times every contender of a plan on every problem that it takes.

    warmup, repetitions  counts, kept to exactly; None: 5 and 30, and fewer where a call takes seconds
    progress             a bar on stderr; None: where stderr is a terminal

    KeyboardInterrupt ends it early, with what was measured. Raises ValueError where there is no GPU or no Triton.
    """
    check_gpu()
    from tqdm import tqdm

    from flash_tutorial import clock

    run = Run(environment=results.environment(), left_out=dict(plan.left_out))
    work = {shape: [each for each in plan.contenders if each.takes(shape)] for shape in plan.shapes}
    steps = 1 + sum(len(contenders) * (1 + clock.ROUNDS) for contenders in work.values())
    with tqdm(total=steps, leave=False, disable=None if progress is None else not progress) as bar:
        try:
            bar.set_description("ceilings")
            run.ceilings = clock.ceilings(shape.dtype for shape in plan.shapes)
            bar.update()
            for shape, contenders in work.items():
                measure_problem(run, shape, contenders, warmup, repetitions, bar)
        except KeyboardInterrupt:
            run.interrupted = True
    return run


def measure_problem(run: Run, shape: Shape, contenders: list[Contender], warmup, repetitions, bar) -> None:
    """Adds the rows of one problem to a run, however it ends; `bar` (tqdm's) goes on by 1 + clock.ROUNDS for each
    contender."""
    import torch

    from flash_tutorial import clock

    rows = {each.name: _row(each, shape) for each in contenders}
    watches: dict[str, clock.Stopwatch] = {}
    state = ""

    def step(name: str) -> None:
        bar.set_description(f"N={shape.seq} {name}")
        bar.update()

    try:
        try:
            q, k, v, judge = _problem(shape)
        except Exception as error:
            for row in rows.values():
                row["failed"] = f"its result cannot be checked: {_reason(error)}"
            return
        pool = torch.cuda.graph_pool_handle()
        for each in contenders:
            step(each.name)
            row = rows[each.name]
            try:
                torch.cuda.empty_cache()  # what the one before had may be needed
                watch = _checked(each, row, (q, k, v, shape.causal), judge, pool)
                if watch is not None:
                    watch.warm(clock.WARMUP if warmup is None else warmup, clock.SLOW if warmup is None else math.inf)
                    watches[each.name] = watch
            except NotImplementedError as error:
                if each.origin == NAMED:
                    row["failed"] = str(error)
                else:
                    run.left_out[each.name] = str(error)
                    del rows[each.name]
            except Exception as error:  # whatever one contender does, the others go on
                row["failed"] = _reason(error)
        turns = {name: _turns(watch, repetitions) for name, watch in watches.items()}
        for name in [name for name, counts in turns.items() if not any(counts)]:
            rows[name]["failed"] = (
                f"a call takes about {watches.pop(name).seconds:.0f} s: --repetitions times it anyway"
            )
        for turn in range(clock.ROUNDS):
            for name in clock.order(watches, turn):
                step(name)
                try:
                    watches[name].take(turns[name][turn])
                except Exception as error:
                    rows[name]["failed"] = _reason(error)
                    del watches[name]
        state = results.gpu_state()
    finally:
        for name, watch in watches.items():
            if (timing := watch.timing) is not None:
                rows[name] |= {
                    "microseconds": dataclasses.asdict(timing),
                    "tflops": round(shape.flops / timing.median / 1e6, 2),
                    "warmup": watch.warmed,
                    "repetitions": len(watch.milliseconds),
                    "gpu_state": state,
                }
        run.rows += [row for row in rows.values() if {"microseconds", "wrong", "failed"} & set(row)]


def _row(contender: Contender, shape: Shape) -> dict[str, Any]:
    from flash_tutorial import build

    row = {"version": contender.name, **dataclasses.asdict(shape)}
    return row if contender.version is None else {**row, "kernel_hash": build.source_hash(contender.version)}


def _problem(shape: Shape):
    """q, k, v and the judge of what is made of them."""
    import torch

    from flash_tutorial.reference import Judge

    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((shape.batch, heads, shape.seq, shape.head_dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    dtype = getattr(torch, shape.dtype)
    q, k, v = (torch.randn(size, generator=generator, device="cuda", dtype=dtype) for size in sizes)
    return q, k, v, Judge(q, k, v, shape.causal)


def _checked(contender: Contender, row: dict[str, Any], inputs: tuple, judge, pool):
    """A contender's stopwatch if its result is right; else None, and the row says what is wrong."""
    from flash_tutorial import clock

    check = judge(*contender.run(*inputs))
    row["error"] = check.error if math.isfinite(check.error) else None
    if not check.ok:
        row["wrong"] = check.detail
        return None
    return clock.Stopwatch(functools.partial(contender.run, *inputs), pool)


def _turns(watch, repetitions: int | None) -> list[int]:
    """How many repetitions a contender has in each round: of a slow one, all in the first."""
    from flash_tutorial import clock

    if repetitions is None:
        affordable = int(PATIENCE / watch.seconds)
        repetitions = 0 if watch.seconds > TOO_SLOW else max(LEAST, min(clock.REPETITIONS, affordable))
    slow = watch.seconds > clock.SLOW
    return [repetitions, *[0] * (clock.ROUNDS - 1)] if slow else clock.turns(repetitions)


def _reason(error: Exception) -> str:
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {torch.cuda.get_device_name()} has {torch.cuda.mem_get_info()[1] / 2**30:.0f} GiB"
    return f"{type(error).__name__}: {error}"


def right(plan: Plan, run: Run) -> bool:
    """Whether every version, and whatever else was asked for by name, is right and has its times."""
    asked = {each.name for each in plan.contenders if each.origin != BESIDE}
    return not any(row["version"] in asked and ("wrong" in row or "failed" in row) for row in run.rows)


# ---------------------------------------------------------------------------------------------- keeping


def save(run: Run, folder: Path | None = None) -> Path:
    """Adds a run to this GPU's results file and returns the file's path. Not kept are rows that failed, which have no
    figure, and those of a reader's own file, whose name means nothing later.

    Raises ValueError if nothing is left to keep, and what `results.append` raises.
    """
    rows = [row for row in run.rows if "failed" not in row and _lasts(row)]
    if not rows:
        raise ValueError("there is no result of a version, a variant or a reference")
    more = {"ceilings": run.ceilings} | ({"interrupted": True} if run.interrupted else {})
    return results.append("times", rows, where=run.environment, folder=folder, **more)


def _lasts(row: dict[str, Any]) -> bool:
    """Whether the name in a row leads back to the kernel that was measured."""
    if "kernel_hash" not in row:
        return True
    return not row["version"].endswith(".cu") and results.kernel_hash(row["version"]) == row["kernel_hash"]


def stored(plan: Plan | None = None, gpu: str | None = None, folder: Path | None = None) -> list[dict[str, Any]]:
    """A stored row of every contender, problem and GPU, of only a plan's or one GPU's ("h200") where these are given:
    see `results.rows` for what is in them beside the row.

    Of several the newest, but rows that are shown beside each other should be of one run, as GPUs are slower in some
    than in others. So a run that has less of a table, which is what the plan has of a family of problems, or without a
    plan a contender's lengths, counts after one that has more, unless the kernel has changed since.

    Raises ValueError for a GPU without any, naming those that have some, and for damaged results.
    """
    rows = [(row, Shape.of(row)) for row in results.rows("times", folder, gpu)]
    if plan is not None:
        names, shapes = {each.name for each in plan.contenders}, set(plan.shapes)
        rows = [(row, shape) for row, shape in rows if row["version"] in names and shape in shapes]
    tables = [(id(row["run"]), shape.family, row["version"] if plan is None else None) for row, shape in rows]
    sizes = Counter(tables)
    best: dict[tuple, tuple[tuple[bool, int], dict[str, Any]]] = {}
    for (row, shape), table in zip(rows, tables, strict=True):
        key, rank = (row["gpu"], row["version"], shape), (not row["stale"], sizes[table])
        if key not in best or rank >= best[key][0]:
            best[key] = rank, row
    return [row for _, row in best.values()]


def suites_stored(plan: Plan, gpu: str | None = None, folder: Path | None = None) -> list[str]:
    """The suites on problems of which contenders of a plan have stored rows, of one GPU ("h200") if it is given."""
    names = {each.name for each in plan.contenders}
    shapes = {Shape.of(row) for row in stored(gpu=gpu, folder=folder) if row["version"] in names}
    return [name for name, suite in suites.SUITES.items() if shapes.intersection(suite.shapes())]
