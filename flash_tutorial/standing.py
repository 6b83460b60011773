"""How near each version comes to FlashAttention-2, on the GPUs in results/ and in a published series of kernels.

    standing.markdown()              # the table of README.md

A version is held against PyTorch's FlashAttention-2 as measured in the same run: `flash-tutorial bench v05 v06 --suite
blog --baseline sdpa_flash` makes one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from flash_tutorial import benchmark, registry, results, suites, timetable
from flash_tutorial.suites import Shape
from flash_tutorial.text import markdown as table
from flash_tutorial.versions import VERSIONS, Version

REFERENCE, SUITE, LENGTH = "sdpa_flash", "blog", 4096

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


def nearest(version: Version) -> int | None:
    """The number, from 1, of the kernel that a version is best held against: the last one before the first that has
    something of a later version. None for a version that takes up nothing of the series."""
    if all(kernel.version != version.number for kernel in KERNELS):
        return None
    return sum(1 for _ in itertools.takewhile(lambda kernel: kernel.version <= version.number, KERNELS))


# What is in results/.


@dataclass(frozen=True)
class Standing:
    """A version's speed on one GPU as a part of FlashAttention-2's in the same run. What has no times is None."""

    date: str  # of the run
    share: float | None  # at LENGTH
    mean: float | None  # of the harmonic means over all lengths of the suite
    stale: bool  # the kernel has changed since


def _plan() -> benchmark.Plan:
    """Every version that takes the suite's problems, beside FlashAttention-2."""
    problems = suites.find(SUITE)
    taking = [v.name for v in VERSIONS if problems.dtype in v.dtypes and set(problems.head_dims) <= set(v.head_dims)]
    return benchmark.plan_of(taking, SUITE, baseline=REFERENCE, only=True)


def stored() -> dict[str, dict[str, Standing]]:
    """By GPU, then by version's name. Of the runs that have times of the version and of FlashAttention-2 the newest of
    those at the most lengths counts.

    Raises ValueError for damaged results.
    """
    plan = _plan()
    lengths = {shape.seq for shape in plan.shapes}
    best: dict[tuple[str, str], tuple[int, timetable.Table]] = {}
    for run in results.runs("times"):
        rows = [{**row, "gpu": run["gpu"], "date": run["date"]} for row in run["rows"] if Shape.of(row) in plan.shapes]
        for made in timetable.tables_of(rows, plan.contenders, plan.baseline):
            for contender in made.contenders:
                known = sum(line.contender == contender and line.ratio is not None for line in made.lines)
                key = run["gpu"], contender.name
                if contender.version and known and known >= best.get(key, (0,))[0]:
                    best[key] = known, made
    found: dict[str, dict[str, Standing]] = {}
    for (gpu, name), (known, made) in sorted(best.items()):
        rows = [line.row for line in made.lines if line.contender.name == name]
        results.mark_stale(rows)
        line = made.line(name, LENGTH)
        mean = made.mean_ratio(name) if known == len(lengths) else None
        stale = any(row["stale"] for row in rows)
        found.setdefault(gpu, {})[name] = Standing(rows[0]["date"], line and line.ratio, mean, stale)
    return found


# How it is shown.


def markdown() -> str:
    """A table of every version that takes the suite's problems, here and elsewhere, the series as a whole, folded, and
    the command that measures. Raises ValueError for damaged results."""
    standings = stored()
    versions = [contender.version for contender in _plan().contenders if contender.version]
    at = f"N={LENGTH}"
    headers = ["version"]
    headers += [header for gpu in standings for header in (f"{gpu.removeprefix('NVIDIA ')}, {at}", "mean")]
    headers += ["nearest kernel", *_published_headers()]
    command = f"bench {' '.join(registry.short(v.name) for v in versions)} --suite {SUITE} --baseline {REFERENCE}"
    rows = []
    for version in versions:
        own = [cell for gpu in standings for cell in _cells(standings[gpu].get(version.name))]
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
            "Without `--stored` it measures them on your GPU, keeps the times, and `make docs` adds a column.",
        ]
    )


def _caption(standings: Mapping[str, Mapping[str, Standing]]) -> str:
    every = [each for found in standings.values() for each in found.values()]
    measured = [f"{gpu}, {max(each.date for each in found.values())[:10]}" for gpu, found in standings.items()]
    said = [
        f"Speed in % of FlashAttention-2's, PyTorch's `{REFERENCE}` in the same run: {suites.find(SUITE)}; at "
        f"N={LENGTH:,}, and in the harmonic mean over the lengths.",
        f"Measured here: {'; '.join(measured)}." if measured else "No times are stored yet.",
        f"{' and '.join(GPUS)}: published for [a series of {len(KERNELS)} kernels]({SERIES}), each built on the one "
        "before. A version stands beside the last of them that holds nothing of a later version.",
    ]
    if any(each.stale for each in every):
        said.append("An asterisk: measured before the kernel's last change.")
    return " ".join(said)


def _published_headers() -> list[str]:
    return [header for gpu in GPUS for header in (f"{gpu}, N={LENGTH}", "mean")]


def _published(kernel: Kernel) -> list[str]:
    return [f"{share:.1f}" for pair in kernel.shares for share in pair]


def _cells(standing: Standing | None) -> list[str]:
    if standing is None:
        return ["–", "–"]
    stale = "*" * standing.stale
    return ["–" if share is None else f"{100 * share:.1f}{stale}" for share in (standing.share, standing.mean)]
