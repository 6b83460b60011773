"""The emulator held against a GPU: the same calls on both, counter by counter.

    rows = hardware.measure(hardware.calls(["v03", "v04"]))    # on a GPU, with ncu; results/counters/ keeps them
    print(hardware.describe(rows))
    hardware.unexplained(hardware.stored())     # of the stored ones, without a GPU: []

What the emulator counts is what the source does, and nvcc may do it otherwise. So a difference is one of these: the
GPU's counter itself is inexact (TOLERANCES); the machine code has other access widths than the source, or copies under
a predicate, which is seen and written down when it is measured; or it is understood and declared (KNOWN). Any other one
is a mistake of the emulator's, or a thing to understand.
"""

from __future__ import annotations

import dataclasses
import json
import math
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from flash_tutorial import build, registry, results
from flash_tutorial.emulator import Counters, Launch, Report
from flash_tutorial.results import FIELDS
from flash_tutorial.text import WIDTH, markdown, wrap
from flash_tutorial.versions import VERSIONS, Version

if TYPE_CHECKING:  # which imports torch
    from flash_tutorial import nsight
    from flash_tutorial.problem import Problem

#: What every version is run on: whole tiles; edges on all sides, a mask, heads that share keys; the largest head.
PROBLEMS: tuple[dict[str, Any], ...] = (
    {"heads": 2, "queries": 512, "keys": 512, "head_dim": 64},
    {"heads": 4, "kv_heads": 2, "queries": 113, "keys": 203, "head_dim": 64, "causal": True},
    {"heads": 2, "queries": 256, "keys": 256, "head_dim": 128},
)

Row = dict[str, Any]  # "version", "kernel_hash", FIELDS, "emulator" and "hardware": {counter: number}, "reasons"


@dataclass(frozen=True)
class Known:
    """A difference that is understood."""

    counters: tuple[str, ...]
    most: float  # of the emulator's figure
    reason: str
    applies: Callable[[Row], bool] = lambda row: True

    def explains(self, row: Row, counter: str) -> bool:
        """Whether a counter's difference in a row is this one."""
        return counter in self.counters and abs(share(row, counter)) <= self.most and self.applies(row)


#: Where the GPU's own counter is not exact.
TOLERANCES = (
    Known(("global_store_sectors",), 0.004, "the GPU's counter of stored sectors is inexact, by up to 0.4 %"),
    Known(
        ("cp_async_wavefronts",),
        0.05,
        "the GPU has no counter of these: Nsight Compute works the figure out, and gives more where some lanes of a "
        "copy only fill with zeros",
    ),
)

#: Where nvcc's code does something else than the source says.
KNOWN = (
    Known(
        ("global_load_sectors", "global_store_sectors"),
        0.0005,
        "nvcc writes four rounds of the loops along a row out, after those left over: lanes that go round once more "
        "are a round behind the others, and where their words meet in sectors differs",
        lambda row: row["version"] == "v00_naive" and row["keys"] % 32 != 0,
    ),
    Known(
        ("cp_async_wavefronts",),
        0.13,  # one tile of K: the more tiles, the less of all copies it is
        "nvcc puts the copies of one tile under a predicate, and Nsight Compute gives 0 for such a copy",
        lambda row: row["version"] == "v08_fused_softmax" and share(row, "cp_async_wavefronts") < 0,
    ),
)


# ---------------------------------------------------------------------------------------------- measuring


def calls(names: Iterable[str] = ("all",)) -> list[tuple[Version, Problem]]:
    """What is run for versions, variants, paths of .cu files, or "all": each version on PROBLEMS, in each of its dtypes
    by turns. Raises ValueError for an unknown name."""
    from flash_tutorial.problem import Problem

    versions = [version for name in names for version in (VERSIONS if name == "all" else [registry.resolve(name)])]
    return [
        (version, Problem(**sizes, dtype=version.dtypes[number % len(version.dtypes)]))
        for version in {version.label: version for version in versions}.values()
        for number, sizes in enumerate(PROBLEMS)
        if sizes["head_dim"] <= max(version.head_dims)
    ]


def measure(
    calls: Sequence[tuple[Version, Problem]], *, keep: bool = True, say: Callable[[str], None] = print
) -> list[Row]:
    """Makes the calls on the emulator and, on this machine's GPU, under Nsight Compute: a row for each.

    keep   add the rows to results/counters/, but for those of a reader's own files
    say    is told why a version has no rows: the kernel does not compile, the emulator has a finding, ncu fails, …

    Raises ValueError for a machine without a GPU and a results file that is damaged; OSError where there is no ncu, it
    may not read the counters, or results cannot be written, all before anything is measured. Ctrl-C keeps what was
    measured.
    """
    import torch
    from tqdm import tqdm

    from flash_tutorial import emulator, nsight

    if not torch.cuda.is_available():
        raise ValueError(
            f"torch {torch.__version__} sees no CUDA GPU to hold the emulator against: --stored shows what was "
            "measured on one; `flash-tutorial doctor` says what is missing"
        )
    where = results.environment() if keep else {}
    if keep:
        results.check("counters", where["name"])
    nsight.find_ncu()
    rows: list[Row] = []
    groups = [(version, [each for _, each in group]) for version, group in groupby(calls, key=lambda call: call[0])]
    try:
        with tqdm(groups, leave=False, disable=None) as bar:
            for version, problems in bar:
                bar.set_description(version.label)
                try:
                    rows += _rows(version, problems)
                except (build.BuildError, nsight.NsightError, emulator.KernelFinding) as error:
                    say(f"{version.label} could not be measured: {error}")
    finally:
        lasting = [row for row in rows if results.kernel_hash(row["version"]) == row["kernel_hash"]]
        if keep and lasting:
            try:
                say(f"{results.append('counters', lasting, where=where)}: {len(lasting)} rows")
            except (ValueError, OSError) as error:  # the rows are shown all the same
                say(f"not kept: {error}")
    return rows


def emulate(version: Version, problem: Problem) -> Report:
    """One call on the emulator, instrumented. Raises KernelFinding if it sees the kernel do wrong."""
    from flash_tutorial import emulator, ops

    q, k, v = problem.tensors()
    with emulator.instrument() as report:
        ops.attention(q, k, v, version=version, causal=problem.causal, scale=problem.scale)
    return report


def _rows(version: Version, problems: Sequence[Problem]) -> list[Row]:
    from flash_tutorial import nsight

    reports = [emulate(version, problem) for problem in problems]
    first, *more = (dataclasses.replace(problem, device="cuda") for problem in problems)
    launches = nsight.measure_known(version, first, nsight.needed(Counters.metrics().values()), more=more)
    emulated = [launch for report in reports for launch in report.launches]
    if [(each.grid, each.block) for each in launches] != [(each.grid, each.block) for each in emulated]:
        raise nsight.NsightError(
            f"other kernels were launched on the GPU, {_listed(launches)}, than in the emulator, {_listed(emulated)}"
        )
    rows = []
    for problem, report in zip(problems, reports, strict=True):
        own, launches = launches[: len(report.launches)], launches[len(report.launches) :]
        counted = [nsight.counted(launch) for launch in own]
        row = {
            "version": version.label,
            "kernel_hash": build.source_hash(version),
            **{name: getattr(problem, name) for name in FIELDS},
            "emulator": comparable(report.totals),
            "hardware": {name: sum(each[name] for each in counted) for name in counted[0]},
        }
        rows.append(row | {"reasons": _reasons(row, version, report)})
    return rows


def _listed(launches: Iterable[Launch | nsight.Launch]) -> str:
    return "; ".join(f"{each.kernel} {each.grid} of {each.block} threads" for each in launches) or "none"


def comparable(counters: Counters) -> dict[str, int]:
    """The counters that Nsight Compute has too."""
    return {name: getattr(counters, name) for name in Counters.metrics()}


# ---------------------------------------------------------------------------------------------- the machine code

# SASS → what the emulator calls it
_ACCESSES = {"LDS": "shared_load", "STS": "shared_store", "LDG": "global_load", "STG": "global_store"}
_NARROW = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}  # bytes; others are of 4


def _reasons(row: Row, version: Version, report: Report) -> dict[str, str]:
    """Counter → why it differs, for those that the machine code explains."""
    import torch

    from flash_tutorial import inspect

    names = [name for name in differing(row) if name.startswith((*_ACCESSES.values(), "cp_async"))]
    if not names:
        return {}
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    try:
        inspection = inspect.inspect(version, arch, row["head_dim"], dtype=row["dtype"])
    except (ValueError, build.BuildError):
        return {}
    code = [instruction for kernel in inspection.kernels for instruction in kernel.sass or ()]
    opcodes = [instruction.opcode for instruction in code]
    source: dict[str, set[int]] = {}
    for launch in report.launches:
        for site in launch.sites:
            source.setdefault(site["op"], set()).add(site["bytes"])
    found = {name: width_reason(name, row["emulator"][name], row["hardware"][name], source, opcodes) for name in names}
    predicated = any(each.text.startswith("@") and each.opcode.startswith("LDGSTS") for each in code)
    if predicated and share(row, "cp_async_wavefronts") < 0:
        found["cp_async_wavefronts"] = "nvcc puts copies under a predicate, and Nsight Compute gives 0 for such a copy"
    return {name: reason for name, reason in found.items() if reason}


def width_reason(
    counter: str, emulated: int, counted: int, source: dict[str, set[int]], code: Iterable[str]
) -> str | None:
    """Why a counter of accesses differs if the machine code has other widths than the source, else None.

    source  kind of access ("shared_load") → bytes that a lane accesses at a time, as the emulator saw it
    code    the opcodes of the kernels that were launched ("LDS.128")
    """
    sass, op = next((pair for pair in _ACCESSES.items() if counter.startswith(pair[1])), (None, None))
    if not source.get(op):
        return None
    opcodes: dict[str, int] = {}  # as "LDS.128", whose other words do not matter here → bytes
    for opcode in code:
        name, *words = opcode.split(".")
        if name == sass:
            width = next((word for word in words if word in _NARROW), "")
            opcodes[".".join(filter(None, (name, width)))] = _NARROW.get(width, 4)
    wider = sorted(name for name, width in opcodes.items() if width > max(source[op]))
    narrower = sorted(name for name, width in opcodes.items() if width < min(source[op]))
    widths = " and ".join(map(str, sorted(source[op])))
    accesses = f"{widths}-byte {op.replace('_', ' ')}s"
    fewest = emulated * min(source[op]) / max(opcodes.values(), default=1)
    if wider and (counter.endswith("conflicts") or fewest <= counted < emulated):
        return f"nvcc makes one {' or '.join(wider)} of several {accesses}"
    if narrower and counted > emulated:
        return f"nvcc splits {accesses} into {' and '.join(narrower)}"
    return None


# ---------------------------------------------------------------------------------------------- judging


def share(row: Row, counter: str) -> float:
    """How much more the GPU counted, as a share of the emulator's figure: 0 if both agree."""
    emulated, counted = row["emulator"].get(counter), row["hardware"].get(counter)
    if emulated == counted or emulated is None or counted is None:  # what was not measured then does not differ
        return 0.0
    return (counted - emulated) / emulated if emulated else math.inf


def reason(row: Row, counter: str) -> str | None:
    """Why the two differ: "" if they do not, None if nothing explains it."""
    if share(row, counter) == 0:
        return ""
    for known in (*KNOWN, *TOLERANCES):
        if known.explains(row, counter):
            return known.reason
    return row.get("reasons", {}).get(counter)


def differing(row: Row) -> list[str]:
    """The counters on which the two do not agree."""
    return [name for name in counters([row]) if share(row, name)]


def unexplained(rows: Iterable[Row]) -> list[str]:
    """The differences that nothing explains, each in a line."""
    return [
        f"{row['version']}, {shape(row)} {row['dtype']}: {counter} is {row['emulator'][counter]:,} in the emulator, "
        f"{row['hardware'][counter]:,} on the GPU"
        for row in rows
        for counter in differing(row)
        if reason(row, counter) is None
    ]


def counters(rows: Sequence[Row]) -> list[str]:
    """The counters that are not 0 everywhere, in the emulator's order."""
    names = [field.name for field in dataclasses.fields(Counters)]
    return [name for name in names if any(row[side].get(name) for row in rows for side in ("emulator", "hardware"))]


# ---------------------------------------------------------------------------------------------- what is stored


def stored(calls: Sequence[tuple[Version, Problem]] | None = None, *, say: Callable[[str], None] = print) -> list[Row]:
    """The newest stored row of each GPU and call, each with "gpu" (its name), "date" and "stale".

    calls  which; None: all that are stored
    say    is told which are not there

    Raises ValueError for a results file that is damaged or of another format.
    """
    rows = results.newest("counters", lambda row: tuple(row[name] for name in FIELDS))
    if calls is None:
        return rows
    found = {_key(row): row for row in rows}
    wanted = {(version.label, *(getattr(problem, name) for name in FIELDS)): version for version, problem in calls}
    missing = dict.fromkeys(version.label for key, version in wanted.items() if key not in found)
    if missing:
        say(f"not measured on a GPU yet: {', '.join(missing)}")
    return [row for row in rows if _key(row) in wanted]


def _key(row: Row) -> tuple:
    return (row["version"], *(row[name] for name in FIELDS))


# ---------------------------------------------------------------------------------------------- showing


def shape(row: Row) -> str:
    """The row's problem but for the dtype, which is a version's own."""
    sizes = "B={batch} Hq={heads} Hkv={kv_heads} M={queries} N={keys} D={head_dim}".format_map(row)
    return f"{sizes} {'causal' if row['causal'] else 'full'}"


def describe(rows: Sequence[Row], fmt: str = "simple") -> str:
    """A table for each problem with a column for each version, then what explains the differences; fmt "github" for
    Markdown, "json" for the rows as data, each with the reasons (null: there is none) of the counters that differ."""
    if fmt == "json":
        data = [
            {name: value for name, value in row.items() if name != "run"}  # the run's environment: it is in the file
            | {"reasons": {name: reason(row, name) for name in differing(row)}}
            for row in rows
        ]
        return json.dumps(data, indent=2, ensure_ascii=False)
    marks = {}  # reason → its letter
    for row in rows:
        for name in differing(row):
            text = reason(row, name)
            marks.setdefault(text, "?" if text is None else letters(len(marks) - (None in marks)))
    parts = ["One figure: the emulator and the GPU agree. Two: emulator → GPU."]
    order = [_title(row) for row in rows]
    for title, group in groupby(sorted(rows, key=lambda row: order.index(_title(row))), key=_title):
        parts += [f"**{title}**" if fmt == "github" else title, *_tables(list(group), marks, fmt)]
    notes = [f"{mark}: {text or 'nothing explains this'}{_range(rows, text)}" for text, mark in marks.items()]
    if any(row.get("stale") for row in rows):
        notes.append("*: measured before the kernel's last change")
    return "\n\n".join([*parts, *(wrap(note) if fmt == "simple" else note for note in notes)])


def _title(row: Row) -> str:
    return f"{row['gpu']}: {shape(row)}" if "gpu" in row else shape(row)


def _tables(rows: Sequence[Row], marks: dict[str | None, str], fmt: str) -> list[str]:
    """Rows of one problem: a line for each counter, as many columns as fit a terminal, or all of them in Markdown."""
    names = counters(rows)
    labels = ["", "", *(name.replace("_", " ") for name in names)]
    columns = [
        [row["version"] + "*" * bool(row.get("stale")), row["dtype"], *(_cell(row, name, marks, fmt) for name in names)]
        for row in rows
    ]
    tables, first = [], 0
    while first < len(columns):
        last, width = first, max(map(len, labels))
        while last < len(columns):
            width += 4 + max(len(line) for cell in columns[last] for line in cell.split("\n"))
            if fmt == "simple" and width > WIDTH and last > first:
                break
            last += 1
        body = list(zip(labels, *columns[first:last], strict=True))
        separator = " " if fmt == "github" else "\n"
        headers = [separator.join(filter(None, pair)) for pair in zip(body[0], body[1], strict=True)]
        align = ["left", *["right"] * (last - first)]
        tables.append(tabulate(body[2:], headers, tablefmt=fmt, colalign=align, disable_numparse=True))
        first = last
    return tables


def _cell(row: Row, name: str, marks: dict[str | None, str], fmt: str) -> str:
    emulated, counted = row["emulator"].get(name), row["hardware"].get(name)
    if emulated is None or counted is None:  # a counter that Nsight Compute was not asked for then
        return "–"
    if emulated == counted:
        return f"{emulated:,}"
    return f"{emulated:,}{' ' if fmt == 'github' else chr(10)}→ {counted:,} {marks[reason(row, name)]}"


def _range(rows: Iterable[Row], text: str | None) -> str:
    shares = [share(row, name) for row in rows for name in differing(row) if reason(row, name) == text]
    return f" ({' to '.join(dict.fromkeys(percent(each) for each in (min(shares), max(shares))))})"


def percent(share: float) -> str:
    """ "+0.02 %", "−49 %"; three digits are enough."""
    return "from 0" if math.isinf(share) else f"{100 * share:+.2g} %".replace("-", "−")


def letters(number: int) -> str:
    """a, b, …, z, aa, ab, …"""
    ahead, last = divmod(number, 26)
    return (letters(ahead - 1) if ahead else "") + string.ascii_lowercase[last]


def summary(rows: Sequence[Row]) -> list[list[str]]:
    """For each counter: its name, Nsight Compute's, in how many calls it is not 0, in how many of those both agree, by
    how much they differ at worst, and why."""
    table = []
    for name in counters(rows):
        met = [row for row in rows if row["emulator"].get(name) or row["hardware"].get(name)]
        apart = [row for row in met if share(row, name)]
        worst = max((share(row, name) for row in apart), key=abs, default=None)
        reasons = dict.fromkeys(reason(row, name) or "not explained" for row in apart)
        words = name.replace("_", " "), Counters.metrics().get(name, "–")
        figures = str(len(met)), str(len(met) - len(apart)), "" if worst is None else percent(worst)
        table.append([*words, *figures, "; ".join(reasons)])
    return table


def agreement(rows: Sequence[Row]) -> str:
    """The summary of stored rows in Markdown, a table for each GPU: a part of kernels/emulator/README.md."""
    headers = ["counter", "Nsight Compute", "calls", "equal", "worst", ""]
    parts = []
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        of_gpu = [row for row in rows if row["gpu"] == gpu]
        versions = ", ".join(sorted({row["version"] for row in of_gpu}))
        table = summary(of_gpu)
        marks = {
            text: f"({letters(number)})"
            for number, text in enumerate(dict.fromkeys(each[-1] for each in table if each[-1]))
        }
        lines = [[name, f"`{metric}`", *figures, marks.get(text, "")] for name, metric, *figures, text in table]
        parts += [
            f"{len(of_gpu)} calls on {gpu} ({max(row['date'] for row in of_gpu)[:10]}): {versions}.",
            markdown(headers, lines, "llrrrl"),
            *(f"{mark} {text}." for text, mark in marks.items()),
        ]
    return "\n\n".join(parts) or "No GPU has been measured yet."
