"""Versions and PyTorch's own attention side by side, on the same tensors.

    comparison = compare(["v00", "v02", "sdpa"], Problem(queries=128, keys=128, causal=True))
    print(render(comparison))                # or "github", "html", "csv", "json"; in a notebook the object shows itself
    comparison["v02"].counters.shared_load_conflicts

Every contender is first checked against float64. On a CPU the versions then say what they did to memory (the emulator's
counters), on a GPU every contender is timed. One that fails keeps its row, which says why, and the others go on.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import html
import importlib.util
import io
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate
from tqdm import tqdm

import flash_tutorial
from flash_tutorial import emulator, reference, registry
from flash_tutorial.clock import Timing, measure
from flash_tutorial.problem import Problem
from flash_tutorial.reference import REFERENCES
from flash_tutorial.text import WIDTH, page, wrap
from flash_tutorial.versions import Version, accepting, find

# ---------------------------------------------------------------------------------------------- results


@dataclass
class Row:
    """What one contender did.

    `status`: "right", "wrong" (the error is over the limit), "finding" (the emulator saw a race, a stray access, …) or
    "failed" (it could not be built or run); `note` then says what, and where. `error` is the largest distance from
    float64, `pytorch_error` that of plain PyTorch in the same precision. `microseconds` (the median), its 20th and
    80th percentiles, `tflops` and `speed` are there on a GPU; `report` with its `counters`, and `seconds` in the
    emulator, on a CPU, for versions. What does not exist is None.
    """

    name: str
    title: str
    status: str = "right"
    note: str = ""
    error: float | None = None
    pytorch_error: float | None = None
    limit: float | None = None
    microseconds: float | None = None
    percentiles: tuple[float, float] | None = None
    tflops: float | None = None
    speed: float | None = None
    seconds: float | None = None
    report: emulator.Report | None = None

    @property
    def counters(self) -> emulator.Counters | None:
        return self.report.totals if self.report else None

    def figures(self) -> dict:
        """The row as plain data for JSON and CSV."""
        low, high = self.percentiles or (None, None)
        return {
            "name": self.name,
            "title": self.title,
            "status": self.status,
            "error": self.error,
            "pytorch_error": self.pytorch_error,
            "limit": self.limit,
            "microseconds": self.microseconds,
            "microseconds_p20": low,
            "microseconds_p80": high,
            "tflops": self.tflops,
            "speed": self.speed,
            "emulation_seconds": self.seconds,
            "note": self.note,
        }


@dataclass
class Comparison(Sequence):
    """Rows in the order asked for, by index or by name: comparison["v03"]. Shows itself as a table in a notebook.

    `baseline` names the row that speeds are relative to, `timer` says how times were taken (None on a CPU).
    """

    problem: Problem
    rows: list[Row]
    baseline: str
    timer: str | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, key: int | slice | str):
        if not isinstance(key, str):
            return self.rows[key]
        name = key if key in [row.name for row in self.rows] else find_version(key).label
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"{key} was not compared: {', '.join(row.name for row in self.rows)} were")

    @property
    def right(self) -> bool:
        return all(row.status == "right" for row in self.rows)

    def _repr_html_(self) -> str:
        return _html_table(self)


# ---------------------------------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Contender:
    """One row to be: `run(q, k, v) -> (out, lse)`, where a reference gives no lse (None)."""

    name: str
    title: str
    run: Callable
    is_reference: bool


def compare(
    names: str | Path | Sequence[str | Path],
    problem: Problem | None = None,
    *,
    baseline: str | None = None,
    like: str | None = None,
    progress: bool | None = None,
) -> Comparison:
    """Runs versions, a reader's own .cu files and REFERENCES on the same tensors.

    names: version names or paths, names of REFERENCES, or "all" for every version that takes the problem's dtype.
    baseline: the contender that speeds are relative to (GPU); None: the first reference, else the first contender.
    like: the version whose dtypes and head sizes a .cu has whose file name does not say.
    progress: a bar on stderr; None: where stderr is a terminal.
    Raises ValueError for a name that is unknown or comes twice, and for a problem that a named version does not take.
    What goes wrong while a contender is built or run is said in its row.
    """
    problem = problem or Problem()
    contenders = find_contenders([names] if isinstance(names, str | Path) else names, problem, like)
    chosen = _find_baseline(contenders, baseline)
    tensors = problem.tensors()
    comparison = Comparison(problem, [], chosen)
    with tqdm(contenders, leave=False, disable=None if progress is None else not progress) as bar:
        for contender in bar:
            bar.set_description(contender.name)
            comparison.rows.append(_run(contender, tensors, problem))
    if problem.device == "cuda":
        _add_times(comparison, contenders, tensors)
    return comparison


def find_contenders(names: Sequence[str | Path], problem: Problem, like: str | None = None) -> list[Contender]:
    """The contenders behind the names, each able to take the problem; else ValueError."""
    contenders: list[Contender] = []
    for name in map(str, names):
        if name in REFERENCES:
            contenders.append(_reference(name, problem))
        elif name == "all":
            contenders += [_version(version, problem) for version in accepting(problem.dtype)]
        else:
            version = find_version(name, like)
            check_takes(version, problem)
            contenders.append(_version(version, problem))
    if not contenders:
        raise ValueError(f"nothing to compare: no version takes {problem.dtype}")
    for index, each in enumerate(contenders):
        if any(each.name == earlier.name for earlier in contenders[:index]):
            raise ValueError(f"{each.name} comes twice: every contender makes one row, under a name of its own")
    return contenders


def find_version(name: str, like: str | None = None) -> Version:
    """The version behind a name or a .cu's path; else ValueError, which names what is near."""
    try:
        if like is not None:
            find(like)  # a wrong --like is refused even where the name says it all
        return registry.resolve(name, like)
    except ValueError as error:
        if "unknown version" not in str(error):  # settings or a file: nothing of PyTorch's was meant
            raise
        raise ValueError(f"{error}; PyTorch's own are {', '.join(REFERENCES)}") from error


def check_takes(version: Version, problem: Problem) -> None:
    """Raises ValueError if the version is not made for the problem's dtype or head_dim, naming those that are."""
    if problem.dtype not in version.dtypes:
        others = ", ".join(each.name for each in accepting(problem.dtype)) or "no version yet"
        accepted = ", ".join(version.dtypes)
        raise ValueError(f"dtype is {problem.dtype}: {version.name} takes {accepted}; {problem.dtype}: {others}")
    if problem.head_dim > max(version.head_dims):
        raise ValueError(f"head_dim is {problem.head_dim}: {version.name} takes 1 to {max(version.head_dims)}")


def _version(version: Version, problem: Problem) -> Contender:
    options = {"causal": problem.causal, "scale": problem.scale, "return_lse": True}
    run = functools.partial(flash_tutorial.attention, version=version, **options)
    return Contender(version.label, version.title, run, False)


def _reference(name: str, problem: Problem) -> Contender:
    reference = REFERENCES[name]
    return Contender(name, reference.title, lambda *qkv: (reference(*qkv, problem.causal, problem.scale), None), True)


def _find_baseline(contenders: Sequence[Contender], wanted: str | None) -> str:
    names = [each.name for each in contenders]
    if wanted is None:
        return next((each.name for each in contenders if each.is_reference), names[0])
    name = wanted if wanted in names or wanted in REFERENCES else find_version(wanted).label
    if name not in names:
        raise ValueError(f"the baseline {name} is not among those compared: {', '.join(names)}")
    return name


def _run(contender: Contender, tensors, problem: Problem) -> Row:
    """Runs a contender once and holds it against float64; on a CPU a version runs instrumented."""
    row = Row(contender.name, contender.title)
    try:
        if problem.device == "cpu" and not contender.is_reference:
            with emulator.instrument(raise_on_finding=False) as row.report:
                out, lse = contender.run(*tensors)
            row.seconds = sum(launch.seconds for launch in row.report.launches)
        else:
            out, lse = contender.run(*tensors)
        check = reference.check(out, lse, *tensors, causal=problem.causal, scale=problem.scale)
    except Exception as error:  # whatever one contender does, the others keep their rows
        row.status, row.note, row.report = "failed", f"{type(error).__name__}: {error}", None
        return row
    row.error, row.pytorch_error, row.limit = check.error, check.pytorch_error, check.limit
    if not check.ok:
        row.status, row.note = "wrong", check.detail
    if row.report and row.report.findings:
        row.status = "finding"
        row.note = "\n".join(filter(None, [str(emulator.KernelFinding(row.report.findings)), row.note]))
    return row


# ---------------------------------------------------------------------------------------------- time on a GPU


def time_on_gpu(functions: dict[str, Callable[[], object]]) -> tuple[dict[str, Timing], str]:
    """The times of functions that take turns, and how they were taken."""
    if importlib.util.find_spec("triton") is not None:
        return measure(functions), "triton do_bench of a CUDA graph, L2 flushed"
    from torch.utils.benchmark import Timer

    timings = {}
    for name, function in functions.items():
        taken = Timer("function()", globals={"function": function}).blocked_autorange(min_run_time=0.5)
        timings[name] = Timing(*(1e6 * float(x) for x in np.percentile(taken.times, (50, 20, 80))))
    return timings, "torch.utils.benchmark, L2 warm"


def _add_times(comparison: Comparison, contenders: Sequence[Contender], tensors) -> None:
    """Times what is right: what a wrong kernel takes does not matter."""
    timed = {row.name: row for row in comparison if row.status == "right"}
    functions = {each.name: functools.partial(each.run, *tensors) for each in contenders if each.name in timed}
    try:
        timings, comparison.timer = time_on_gpu(functions)
    except RuntimeError as error:  # after one kernel's stray access CUDA refuses this process everything
        for row in timed.values():
            row.status, row.note = "failed", f"right, but not timed: {error}"
        return
    base = timings.get(comparison.baseline)
    for name, timing in timings.items():
        row = timed[name]
        row.microseconds, row.percentiles = timing.median, (timing.p20, timing.p80)
        row.tflops = comparison.problem.flops() / timing.median / 1e6
        row.speed = base and base.median / timing.median


# ---------------------------------------------------------------------------------------------- rendering


def render(comparison: Comparison, format: str = "simple") -> str:
    """A comparison as text: "simple" (a terminal), "github" (Markdown), "html" (a page), "csv" or "json"."""
    renderers = {"simple": _simple, "github": _github, "html": _html_page, "csv": _csv, "json": to_json}
    if format not in renderers:
        raise ValueError(f"format is {format!r}: accepted are {', '.join(renderers)}")
    return renderers[format](comparison)


def sectors_per_request(counters: emulator.Counters) -> float | None:
    """32-byte sectors that one warp-wide global load or store touches on average: 4 for neighbouring 4-byte words."""
    requests = counters.global_load_requests + counters.global_store_requests
    return (counters.global_load_sectors + counters.global_store_sectors) / requests if requests else None


# terminal header, full header, value; those of the emulator, from its Counters
_COUNTER_COLUMNS: tuple[tuple[str, str, Callable], ...] = (
    ("global\nload\nbytes", "global load bytes", lambda c: c.global_load_bytes),
    ("global\nstore\nbytes", "global store bytes", lambda c: c.global_store_bytes),
    ("sec-\ntors\n/req.", "sectors / request", sectors_per_request),
    ("shared\nwave-\nfronts", "shared wavefronts", lambda c: c.shared_load_wavefronts + c.shared_store_wavefronts),
    ("bank\ncon-\nflicts", "bank conflicts", lambda c: c.shared_load_conflicts + c.shared_store_conflicts),
    ("bar-\nriers", "barriers", lambda c: c.barriers),
    ("shuf-\nfles", "shuffles", lambda c: c.shuffles),
)


def short(number: float) -> str:
    """At most six characters, four digits: 1234567 is 1.235M."""
    for least, unit, letter in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(number) >= least:
            return f"{number / unit:.4g}{letter}"
    return f"{number:.4g}"


def exact(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.4g}"


def _table(comparison: Comparison, narrow: bool) -> tuple[list[str], list[list[str]]]:
    """Headers and cells; narrow ones fit a terminal of 100 columns, the others are exact."""
    number = short if narrow else exact
    columns = [  # terminal header, full header, value (None: a dash), how it is written
        ("version", "version", lambda row: row.name, str),
        ("error", "error", lambda row: row.error, "{:.1e}".format),
        ("result", "result", lambda row: row.status, str),
    ]
    if comparison.problem.device == "cuda":
        relative = f"{comparison.baseline} = 1"
        columns += [
            ("µs", "µs", lambda row: row.microseconds, "{:.1f}".format),
            ("20 to 80 %", "µs, 20 to 80 %", lambda row: row.percentiles, lambda p: f"{p[0]:.1f} to {p[1]:.1f}"),
            ("TFLOP/s", "TFLOP/s", lambda row: row.tflops, "{:.2f}".format),
            (f"speed,\n{relative}", f"speed, {relative}", lambda row: row.speed, "{:.3f}".format),
        ]
    else:
        for stacked, full, value in _COUNTER_COLUMNS:
            columns.append((stacked, full, lambda row, v=value: row.counters and v(row.counters), number))
        columns.append(("emul.\ns", "emulation s", lambda row: row.seconds, "{:.2f}".format))
    headers = [stacked if narrow else full for stacked, full, _, _ in columns]
    values = [[(value(row), write) for _, _, value, write in columns] for row in comparison]
    return headers, [["-" if value is None else write(value) for value, write in row] for row in values]


def _caption(comparison: Comparison) -> list[str]:
    lines = [str(comparison.problem)]
    row = next((row for row in comparison if row.limit is not None), None)
    if row:
        lines.append(
            f"error: largest distance from float64; PyTorch's own in {comparison.problem.dtype} is "
            f"{row.pytorch_error:.1e}, the limit {row.limit:.1e}"
        )
    if comparison.timer:
        lines.append(f"time: median, {comparison.timer}")
    return lines


def _notes(comparison: Comparison) -> list[tuple[str, str]]:
    return [(f"{row.name}: {row.status}", row.note) for row in comparison if row.note]


def _columns(headers: list[str], rows: list[list[str]], left: Sequence[int]) -> str:
    """A table as narrow as can be, two spaces between columns: tabulate makes every header two wider than it is."""
    height = max(header.count("\n") for header in headers) + 1
    stacked = [([""] * height + header.split("\n"))[-height:] for header in headers]
    widths = [max(map(len, [*words, *column])) for words, column in zip(stacked, zip(*rows, strict=True), strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    rule = ["-" * width for width in widths]
    return "\n".join(map(line, [*zip(*stacked, strict=True), rule, *rows]))


def _simple(comparison: Comparison) -> str:
    table = _columns(*_table(comparison, narrow=True), left=(0, 2))
    notes = [f"{title}\n{wrap(textwrap.indent(note, '  '))}" for title, note in _notes(comparison)]
    return "\n\n".join(["\n".join(_caption(comparison)), table, *notes])


def _github(comparison: Comparison) -> str:
    headers, cells = _table(comparison, narrow=False)
    cells = [[text.replace("|", "\\|") for text in row] for row in cells]
    align = ["left", "right", "left"] + ["right"] * (len(headers) - 3)
    table = tabulate(cells, headers, tablefmt="github", disable_numparse=True, colalign=align)
    notes = [f"**{title}**\n\n{textwrap.indent(note, '    ')}" for title, note in _notes(comparison)]
    return "\n\n".join(["  \n".join(_caption(comparison)), table, *notes])


def _html_table(comparison: Comparison) -> str:
    headers, cells = _table(comparison, narrow=False)

    def row(tag: str, texts: list[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"

    caption = "<br>".join(map(html.escape, _caption(comparison)))
    notes = "".join(
        f"<p><b>{html.escape(title)}</b></p><pre>{html.escape(note)}</pre>" for title, note in _notes(comparison)
    )
    body = "\n".join(row("td", texts) for texts in cells)
    return f"<p>{caption}</p>\n<table>\n<thead>{row('th', headers)}</thead>\n<tbody>\n{body}\n</tbody>\n</table>{notes}"


def _html_page(comparison: Comparison) -> str:
    style = "td,th{text-align:right}td:first-child{text-align:left}"
    return page("flash-tutorial compare", _html_table(comparison), style)


def as_data(row: Row) -> dict:
    """A row for JSON: figures, counters (None where there are none) and findings; NaN and infinities become None."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.figures().items()
    }
    findings = [{"kind": each.kind, "message": each.message} for each in row.report.findings] if row.report else []
    return finite | {"counters": dataclasses.asdict(row.counters) if row.counters else None, "findings": findings}


def to_json(comparison: Comparison, lines: bool = False) -> str:
    """Problem and rows as JSON; with `lines` each row has the counters of its source lines too, where it has any."""
    rows = []
    for row in comparison:
        rows.append(as_data(row))
        if lines:
            rows[-1]["lines"] = [dataclasses.asdict(line) for line in row.report.lines] if row.report else None
    content = {
        "problem": comparison.problem.options(),
        "torch": torch.__version__,
        "timer": comparison.timer,
        "baseline": comparison.baseline,
        "rows": rows,
    }
    return json.dumps(content, indent=2)


def _csv(comparison: Comparison) -> str:
    names = [each.name for each in dataclasses.fields(emulator.Counters)] if comparison.problem.device == "cpu" else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    figures = [row.figures() for row in comparison]
    writer.writerow([*figures[0], *names])
    for row, values in zip(comparison, figures, strict=True):
        writer.writerow([*values.values(), *(getattr(row.counters, name, None) for name in names)])
    return text.getvalue().rstrip("\n")


# ---------------------------------------------------------------------------------------------- one row in full


def describe(comparison: Comparison, lines: bool = False) -> str:
    """The first row in full, for a terminal of 100 columns; with `lines` the counters by source line too."""
    row, problem = comparison[0], comparison.problem
    facts = [("problem", str(problem)), ("result", row.status)]
    if row.error is not None:
        facts += [
            ("error", f"{row.error:.2e}  (largest distance from float64)"),
            ("PyTorch's", f"{row.pytorch_error:.2e}  (plain PyTorch in {problem.dtype})"),
            ("limit", f"{row.limit:.2e}  (twice PyTorch's, plus a little)"),
        ]
    if row.percentiles is not None:
        low, high = row.percentiles
        facts += [
            ("time", f"{row.microseconds:.1f} µs  (20 to 80 %: {low:.1f} to {high:.1f}; {comparison.timer})"),
            ("rate", f"{row.tflops:.2f} TFLOP/s"),
        ]
    if row.seconds is not None:
        facts.append(("emulation", f"{row.seconds:.2f} s, counting and checking for races"))
    parts = [f"{row.name}: {row.title}\n" + tabulate(facts, tablefmt="plain", disable_numparse=True)]
    if row.note:
        parts.append(wrap(row.note))
    if row.report and row.report.launches:
        parts.append(counter_table(row.report.totals))
        if lines:
            parts.append(line_table(row.report.lines))
    return "\n\n".join(parts)


def counter_table(counters: emulator.Counters, fmt: str = "simple") -> str:
    """What is not zero, and what it means; "simple" fits a terminal, "github" is Markdown."""
    rows = [
        (each.name.replace("_", " "), exact(getattr(counters, each.name)), each.metadata["meaning"])
        for each in dataclasses.fields(counters)
        if getattr(counters, each.name)
    ]
    return tabulate(
        rows,
        headers=["counter", "count", "what is counted"],
        tablefmt=fmt,
        maxcolwidths=[None, None, 54] if fmt == "simple" else None,
        colalign=["left", "right", "left"] if rows else None,
        disable_numparse=True,
    )


def line_table(lines: Sequence[emulator.LineCounters], warp_time: Mapping[tuple[str, int], float] | None = None) -> str:
    """Counters by source line, narrow enough for a terminal; a column that is zero throughout is left out.

    warp_time  (file, line) → the share of the warps' time that goes there, where that is known
    """
    totals = sum((line.counters for line in lines), emulator.Counters())
    columns = [(stacked, lambda line, v=v: v(line.counters)) for stacked, _, v in _COUNTER_COLUMNS if v(totals)]
    if warp_time:
        columns.append(("warps'\ntime,\n%", lambda line: 100 * warp_time.get((line.file, line.line), 0)))
    taken = sum(2 + max(6, *map(len, stacked.split("\n"))) for stacked, _ in columns)
    room = WIDTH - taken - len("line  ")
    rows = []
    for line in lines:
        text = line.text or Path(line.file).name  # without addr2line an address in the library is all there is
        source = text if len(text) <= room else text[: room - 1] + "…"
        values = [value(line) for _, value in columns]
        rows.append([str(line.line), source, *(short(value) if value else "" for value in values)])
    if not rows:
        return "no line of source did anything that is counted"
    return _columns(["line", "source", *(stacked for stacked, _ in columns)], rows, left=(1,))
