"""How near each version comes to FlashAttention-2, on the GPUs in results/ and in a published series of kernels.

    standing.markdown()              # the tables of README.md

A version is held against PyTorch's FlashAttention-2 as measured in the same run: `flash-tutorial bench v05 v06 --suite
blog --baseline sdpa_flash` makes one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flash_tutorial import benchmark, registry, results, suites, timetable
from flash_tutorial.suites import Shape
from flash_tutorial.text import markdown as table
from flash_tutorial.versions import VERSIONS, Version

REFERENCE, SUITE, LENGTH = "sdpa_flash", "blog", 4096
FAMILIES, BESIDE = "paper", "sdpa_cudnn"  # the suite that has every family, and who is held against it there too

# What others published: shares carry over from GPU to GPU, times do not.

SERIES = "https://lubits.ch/flash/Part-1"  # a blog; full attention with D=128 in fp16 and bf16, lengths 512 to 16,384
GPUS = ("A100", "RTX 3090")


@dataclass(frozen=True)
class Kernel:
    """One of the series, built on the one before."""

    what: str  # it changed
    version: int  # the number of the one that takes this up here
    shares: tuple[tuple[float, float], ...]  # for each of GPUS, in % of FlashAttention-2: at LENGTH, harmonic mean


KERNELS = (
    Kernel("base", 5, ((15.8, 16.6), (49.5, 49.8))),
    Kernel("swizzle: no bank conflicts", 6, ((72.6, 72.4), (98.3, 98.6))),
    Kernel("K and V are asked for early", 7, ((77.6, 79.9), (99.4, 100.0))),
    Kernel("fragments step by step, not all first", 7, ((77.6, 80.0), (100.0, 100.4))),
    Kernel("fragments one step ahead", 7, ((76.8, 79.1), (99.7, 100.3))),
    Kernel("scale and exponential fused", 8, ((78.1, 80.4), (99.9, 100.4))),
    Kernel("tiles tuned", 9, ((80.3, 82.3), (101.5, 101.8))),
    Kernel("fewer IADD3, LOP3 and SHF", 10, ((87.8, 88.9), (101.7, 101.2))),
    Kernel("fewer IMAD.MOV.U32 and MOV", 10, ((95.3, 96.3), (97.5, 97.4))),
    Kernel("no CSRZ, and the first tile's softmax apart", 8, ((93.9, 95.0), (102.9, 102.3))),
    Kernel("encoded swizzle, registers to shared memory", 10, ((95.2, 96.7), (102.8, 102.3))),
    Kernel("miscellaneous", 10, ((95.3, 97.0), (102.8, 102.3))),
    Kernel("tiles of keys backwards", 10, ((97.6, 98.8), (101.5, 101.2))),
    Kernel("cache configuration", 10, ((97.7, 99.1), (101.5, 101.2))),
    Kernel("tiling along head_dim", 10, ((97.9, 99.5), (101.5, 101.3))),
    Kernel("static strides", 10, ((99.2, 100.4), (100.9, 100.7))),
)


def change(number: int) -> list[tuple[str, str, float, float]]:
    """What kernel `number` of the series, from 2, changed, and for each of GPUS the GPU and the share before and after,
    in % of FlashAttention-2 at LENGTH."""
    before, kernel = KERNELS[number - 2 : number]
    pairs = zip(GPUS, before.shares, kernel.shares, strict=True)
    return [(kernel.what, gpu, old, new) for gpu, (old, _), (new, _) in pairs]


def nearest(version: Version) -> int | None:
    """The number, from 1, of the kernel that a version is best held against: the last one before the first that has
    something of a later version. None for a version that takes up nothing of the series."""
    if all(kernel.version != version.number for kernel in KERNELS):
        return None
    return sum(1 for _ in itertools.takewhile(lambda kernel: kernel.version <= version.number, KERNELS))


# What is in results/.


@dataclass(frozen=True)
class Standing:
    """A contender's speed on one GPU, in one family of problems, as a part of FlashAttention-2's in the same run. What
    has no times is None."""

    date: str  # of the run
    share: float | None  # at LENGTH
    mean: float | None  # of the harmonic means over all lengths of the suite
    stale: bool  # the kernel has changed since


def plan_of(suite: str) -> benchmark.Plan:
    """Every version that takes the suite's problems, and in FAMILIES who is beside, with FlashAttention-2."""
    problems = suites.find(suite)
    taking = [v.name for v in VERSIONS if problems.dtype in v.dtypes and set(problems.head_dims) <= set(v.head_dims)]
    others = (REFERENCE, BESIDE) if suite == FAMILIES else ()
    return benchmark.plan_of([*taking, *others], suite, baseline=REFERENCE, only=True)


def stored(suite: str = SUITE) -> dict[str, dict[str, dict[str, Standing]]]:
    """By GPU, then by contender's name, then by family (see `Shape.brief`); all families of a contender from one run.
    Of the runs that have times of it and of FlashAttention-2 the newest counts of those with the most whole families,
    and where none has one, of those with the most lengths.

    Raises ValueError for damaged results.
    """
    plan = plan_of(suite)
    lengths = sorted({shape.seq for shape in plan.shapes})
    best: dict[tuple[str, str], tuple[tuple[int, int], list[timetable.Table]]] = {}
    for run in results.runs("times"):
        rows = [{**row, "gpu": run["gpu"], "date": run["date"]} for row in run["rows"] if Shape.of(row) in plan.shapes]
        tables = timetable.tables_of(rows, plan.contenders, plan.baseline)
        for contender in plan.contenders:
            known = [
                sum(line.contender == contender and line.ratio is not None for line in made.lines) for made in tables
            ]
            rank = known.count(len(lengths)), max(known, default=0)
            key = run["gpu"], contender.name
            if contender.name != plan.baseline and any(rank) and rank >= best.get(key, (rank,))[0]:
                best[key] = rank, tables
    found: dict[str, dict[str, dict[str, Standing]]] = {}
    for (gpu, name), (_, tables) in sorted(best.items(), key=lambda each: each[0]):
        rows = [line.row for made in tables for line in made.lines if line.contender.name == name]
        results.mark_stale(rows)
        stale = any(row["stale"] for row in rows)
        for made in tables:
            line = made.line(name, LENGTH)
            mean = made.mean_ratio(name) if made.lengths == lengths else None
            each = Standing(rows[0]["date"], line and line.ratio, mean, stale)
            found.setdefault(gpu, {}).setdefault(name, {})[made.lines[0].shape.brief] = each
    return found


# How it is shown.


def markdown() -> str:
    """A table of every version that takes the suite's problems, here and elsewhere, the series as a whole, folded, one
    of every family, and the commands that measure. Raises ValueError for damaged results."""
    standings = stored()
    plan = plan_of(SUITE)
    (family,) = {shape.brief for shape in plan.shapes}
    versions = [contender.version for contender in plan.contenders if contender.version]
    headers = ["version"]
    headers += [header for gpu in standings for header in (f"{_short(gpu)}, N={LENGTH}", "mean")]
    headers += ["nearest kernel", *_published_headers()]
    command = f"bench {_typed(version.name for version in versions)} --only --suite {SUITE} --baseline {REFERENCE}"
    rows = []
    for version in versions:
        each = [found.get(version.name, {}).get(family) for found in standings.values()]
        own = [_percent(one, share) for one in each for share in ("share", "mean")]
        number = nearest(version)
        theirs = _published(KERNELS[number - 1]) if number else [""] * len(_published_headers())
        rows.append([version.name, *own, str(number or ""), *theirs])
    series = [
        [str(number), kernel.what, f"v{kernel.version:02}", *_published(kernel)]
        for number, kernel in enumerate(KERNELS, 1)
    ]
    folded = table(["kernel", "what it changed", "taken up by", *_published_headers()], series, "rll" + "r" * 4)
    return "\n\n".join(
        [
            _caption(standings),
            table(headers, rows, "l" + "r" * (len(headers) - 1)),
            f"<details><summary>The {len(KERNELS)} kernels of the series</summary>\n\n{folded}\n\n</details>",
            f"```sh\n.venv/bin/flash-tutorial {command} --stored\n```",
            *_families(),
            "Without `--stored` they measure on your GPU and keep the times, and `make docs` adds its columns.",
        ]
    )


def _families() -> list[str]:
    """The caption, the table and the command of the suite that has every family."""
    standings = stored(FAMILIES)
    plan = plan_of(FAMILIES)
    families = dict.fromkeys(shape.brief for shape in plan.shapes)
    names = [each.name for each in plan.contenders if each.name != plan.baseline]
    rows = [
        [
            name,
            *(_percent(found.get(name, {}).get(family), "mean") for found in standings.values() for family in families),
        ]
        for name in names
        if name != BESIDE or any(name in found for found in standings.values())
    ]
    headers = ["", *(f"{_short(gpu)}, {family}" for gpu in standings for family in families)]
    said = [
        f"With both head sizes, full and causal, the harmonic mean over the lengths in % of `{REFERENCE}`'s, all "
        f"figures of a row from one run: {suites.find(FAMILIES)}.",
        *_measured(standings),
    ]
    contenders = _typed(each.name for each in plan.contenders)
    command = f"bench {contenders} --only --suite {FAMILIES} --baseline {REFERENCE} --stored"
    shown = [table(headers, rows, "l" + "r" * (len(headers) - 1))] if standings else []
    return [" ".join(said), *shown, f"```sh\n.venv/bin/flash-tutorial {command}\n```"]


def _caption(standings: Mapping[str, Mapping[str, Mapping[str, Standing]]]) -> str:
    measured, *stale = _measured(standings)
    said = [
        f"Speed in % of FlashAttention-2's, PyTorch's `{REFERENCE}` in the same run: {suites.find(SUITE)}; at "
        f"N={LENGTH:,}, and in the harmonic mean over the lengths.",
        measured,
        f"{' and '.join(GPUS)}: published for [a series of {len(KERNELS)} kernels]({SERIES}), each built on the one "
        "before. A version stands beside the last of them that holds nothing of a later version.",
        *stale,
    ]
    return " ".join(said)


def _measured(standings: Mapping[str, Mapping[str, Mapping[str, Standing]]]) -> list[str]:
    """When, on which GPUs; and what an asterisk is, if there is one."""
    every = {gpu: [each for own in found.values() for each in own.values()] for gpu, found in standings.items()}
    dates = [f"{gpu}, {max(each.date for each in found)[:10]}" for gpu, found in every.items()]
    said = [f"Measured here: {'; '.join(dates)}." if dates else "No times are stored yet."]
    if any(each.stale for found in every.values() for each in found):
        said.append("An asterisk: measured before the kernel's last change.")
    return said


def _short(gpu: str) -> str:
    return gpu.removeprefix("NVIDIA ")


def _typed(names: Iterable[str]) -> str:
    return " ".join(map(registry.short, names))


def _published_headers() -> list[str]:
    return [header for gpu in GPUS for header in (f"{gpu}, N={LENGTH}", "mean")]


def _published(kernel: Kernel) -> list[str]:
    return [f"{share:.1f}" for pair in kernel.shares for share in pair]


def _percent(standing: Standing | None, share: str) -> str:
    """One of a standing's shares, by its name."""
    value = standing and getattr(standing, share)
    return f"{100 * value:.1f}{'*' * standing.stale}" if value else "–"
