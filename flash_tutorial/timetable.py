"""Tables of times, live or stored: one for each family of problems that differ in length only.

    tables = tables_of(rows, contenders, baseline="sdpa_flash")
    tables[0].line("v04_vectorized", 2048).ratio        # times as fast as the baseline
    print(render(tables, "github"))

A difference from the baseline that is smaller than the spread of the two times is called noise.
"""

from __future__ import annotations

import csv
import functools
import html
import io
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import SEPARATING_LINE, tabulate

from flash_tutorial.benchmark import Contender
from flash_tutorial.clock import Timing
from flash_tutorial.registry import short
from flash_tutorial.suites import Shape, in_common
from flash_tutorial.text import WIDTH, page, wrap

FORMATS = ("simple", "github", "html", "csv", "json")


@dataclass(frozen=True)
class Line:
    """One contender on one problem, beside the baseline on the same. What does not exist is None.

    row, base   as `benchmark.Run.shown` and `benchmark.stored` give them; base is None if the baseline has no time
    """

    contender: Contender
    shape: Shape
    row: Mapping[str, Any]
    base: Mapping[str, Any] | None

    @property
    def microseconds(self) -> float | None:
        """The median."""
        return self.row["microseconds"]["median"] if "microseconds" in self.row else None

    @property
    def tflops(self) -> float | None:
        return self.microseconds and self.shape.flops / self.microseconds / 1e6

    @property
    def share(self) -> float | None:
        """TFLOP/s as a part of what a matrix product reached in the same run."""
        ceiling = (self.row["run"].get("ceilings") or {}).get("tflops", {}).get(self.shape.dtype)
        return self.tflops and ceiling and self.tflops / ceiling

    @property
    def spread(self) -> float | None:
        """As a part of the median, see `clock.Timing`."""
        return Timing.of(self.row).spread if self.microseconds else None

    @property
    def ratio(self) -> float | None:
        """Times as fast as the baseline."""
        return self.base and self.microseconds and self.base["microseconds"]["median"] / self.microseconds

    @property
    def delta(self) -> float | None:
        """By which part of the baseline's time it takes longer; negative: less long."""
        return self.ratio and 1 / self.ratio - 1

    @property
    def noise(self) -> bool:
        """Whether it differs from the baseline by less than the larger of the two spreads."""
        return bool(self.ratio) and self.row is not self.base and Timing.of(self.row).noise(Timing.of(self.base))

    @property
    def note(self) -> str:
        """Why there is no time, if there is none."""
        return self.row.get("wrong") or self.row.get("failed") or ""


@dataclass(frozen=True)
class Table:
    """The lines of one family of problems on one GPU, by length, and within it in the contenders' order."""

    gpu: str
    lines: tuple[Line, ...]
    baseline: str

    @property
    def lengths(self) -> list[int]:
        return sorted({line.shape.seq for line in self.lines})

    @property
    def contenders(self) -> list[Contender]:
        return list({line.contender.name: line.contender for line in self.lines}.values())

    def line(self, name: str, length: int) -> Line | None:
        """Of a contender, by its name, at a length; None if there is none."""
        found = (line for line in self.lines if line.contender.name == name and line.shape.seq == length)
        return next(found, None)

    @functools.cached_property
    def means(self) -> dict[str, float]:
        """The harmonic mean over the lengths of each contender's TFLOP/s; of those only that have them all."""
        found = {}
        for contender in self.contenders:
            lines = [self.line(contender.name, length) for length in self.lengths]
            if all(line and line.tflops for line in lines):
                found[contender.name] = statistics.harmonic_mean([line.tflops for line in lines])
        return found

    def mean_ratio(self, name: str) -> float | None:
        """A contender's harmonic mean as a part of the baseline's."""
        own, base = self.means.get(name), self.means.get(self.baseline)
        return own and base and own / base

    @property
    def problem(self) -> str:
        """What the lines' problems have in common: "float32, B=4, H=12, D=64, full"."""
        return in_common([line.shape for line in self.lines])


def tables_of(rows: Sequence[Mapping[str, Any]], contenders: Sequence[Contender], baseline: str) -> list[Table]:
    """A table for each GPU and family of the rows, in their order; rows of other names than the contenders' are left
    out."""
    order = {contender.name: index for index, contender in enumerate(contenders)}
    by_problem = {(row["gpu"], Shape.of(row), row["version"]): row for row in rows}
    families: dict[tuple, list[Line]] = {}
    for (gpu, shape, name), row in by_problem.items():
        if name in order:
            base = by_problem.get((gpu, shape, baseline))
            base = base if base and "microseconds" in base else None
            families.setdefault((gpu, shape.family), []).append(Line(contenders[order[name]], shape, row, base))
    return [
        Table(gpu, tuple(sorted(lines, key=lambda line: (line.shape.seq, order[line.contender.name]))), baseline)
        for (gpu, _), lines in families.items()
    ]


# ---------------------------------------------------------------------------------------------- writing


def render(tables: Sequence[Table], format: str = "simple", left_out: Mapping[str, str] | None = None) -> str:
    """Tables as text: "simple" (a terminal of 100 columns), "github" (Markdown), "html" (a page), "csv" or "json".

    left_out  who was not measured, and why
    """
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}: accepted are {', '.join(FORMATS)}")
    if format == "csv":
        return _csv(tables)
    if format == "json":
        return _json(tables, left_out or {})
    parts: list[str] = []
    for table in tables:
        parts += [_text(_caption(table), format), _times(table, format)]
        if len(table.lengths) > 1:
            parts += [_text([_MEANS.format(baseline=table.baseline)], format), _over_lengths(table, format)]
        if notes := _notes(table):
            parts.append(_list(notes, format))
    if format == "simple":
        parts.append(_who(tables))
    if left_out:
        reasons = dict.fromkeys(left_out.values())
        names = {why: ", ".join(name for name, reason in left_out.items() if reason == why) for why in reasons}
        parts.append(_list([f"left out: {names[why]}: {why}" for why in reasons], format))
    text = "\n\n".join(parts)
    return page("flash-tutorial bench", text) if format == "html" else text


_MEANS = "Speed in % of {baseline} at each length N; harmonic mean of the TFLOP/s, and in % of {baseline}'s:"


def _caption(table: Table) -> list[str]:
    rows = [line.row for line in table.lines]
    lines = [f"{table.problem} on {table.gpu}, measured {_all_of(row['date'][:10] for row in rows)}"]
    counts = [(row["repetitions"], row["warmup"]) for row in rows if {"repetitions", "warmup"} <= set(row)]
    if counts:
        repetitions, warmups = (_range(values) for values in zip(*counts, strict=True))
        lines.append(f"µs: median of {repetitions} after {warmups} to warm up; ± %: half of what lies from 20 to 80 %")
    ceilings = [row["run"]["ceilings"] for row in rows if row["run"].get("ceilings")]
    if ceilings:
        dtype = table.lines[0].shape.dtype
        products = _range(each["tflops"][dtype] for each in ceilings if dtype in each.get("tflops", {}))
        copies = _range(each["copy_tb_s"] for each in ceilings if "copy_tb_s" in each)
        lines.append(
            f"ceilings of the run: {products or 'unknown'} TFLOP/s (product), {copies or 'unknown'} TB/s (copy)"
        )
    lines.append(f"Δ %, ratio: against {table.baseline}; noise: closer to it than the spread")
    if len({row["date"] for row in rows}) > 1:
        lines.append("measured in several runs: a ratio between two of them carries the drift of the GPU")
    if any(row["stale"] for row in rows):
        lines.append("*: stale, measured before the kernel's last change")
    return lines


def _all_of(words) -> str:
    return ", ".join(dict.fromkeys(words))


def _range(values) -> str:
    values = sorted(set(values))
    return " to ".join(f"{value:g}" for value in (values if len(values) < 2 else (values[0], values[-1])))


def _notes(table: Table) -> list[str]:
    """Why contenders have no time, each reason once, with the lengths that it holds for."""
    lengths: dict[tuple[str, str, str], list[int]] = {}
    for line in table.lines:
        if line.note:
            kind = "wrong" if "wrong" in line.row else "failed"
            lengths.setdefault((line.contender.name, kind, line.note), []).append(line.shape.seq)
    return [f"{name} {kind} at N={_all_of(map(str, at))}: {why}" for (name, kind, why), at in lengths.items()]


def _number(value: float | None, write: Callable[[float], str]) -> str:
    return "-" if value is None else write(value).replace("-", "−")


def _cells(line: Line, format: str) -> dict[str, str]:
    """A row by its headers."""
    name = _short(line.contender.name) if format == "simple" else line.contender.name
    cells = {
        "N": str(line.shape.seq),
        "version": name + "*" * bool(line.row["stale"]),
        "title": line.contender.title,
        "µs": next((kind for kind in ("wrong", "failed") if kind in line.row), None)
        or _number(line.microseconds, "{:,.1f}".format),
        "Δ %": "noise" if line.noise else _number(line.delta, lambda delta: f"{100 * delta:+,.1f}"),
        "TFLOP/s": _number(line.tflops, "{:.2f}".format),
        "% of\nceiling": _number(line.share, lambda share: f"{100 * share:.1f}"),
        "ratio": _number(line.ratio, "{:.3f}".format),
        "± %": _number(line.spread, lambda spread: f"{100 * spread:.1f}"),
    }
    if format == "simple":
        return cells
    cells = {header.replace("\n", " "): cell for header, cell in cells.items()}
    return {**cells, "description": line.contender.idea}


_LEFT = ("version", "title", "description")


def _times(table: Table, format: str) -> str:
    rows = [_cells(line, format) for line in table.lines]
    if format == "simple":
        return _fitted(rows)
    return _tabulate(rows, format)


def _fitted(rows: list[dict[str, str]]) -> str:
    """The table for a terminal: with titles, or as much of them as there is room for, and a line between lengths."""
    for room in (*range(30, 7, -1), 0):
        titled = [{**row, "title": _cut(row["title"], room)} for row in rows]
        if not room:
            for row in titled:
                del row["title"]
        text = _tabulate(titled, "simple", groups="N")
        if max(map(len, text.splitlines())) <= WIDTH:
            break
    return text


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(room - 1, 0)] + "…"


def _short(name: str) -> str:
    """A variant as a reader types it; all other names as they are."""
    return short(name) if ":" in name else name


def _over_lengths(table: Table, format: str) -> str:
    rows = []
    for contender in table.contenders:
        lines = {length: table.line(contender.name, length) for length in table.lengths}
        percent = {
            str(length): _number(line and line.ratio, lambda ratio: f"{100 * ratio:.1f}")
            for length, line in lines.items()
        }
        name = _short(contender.name) if format == "simple" else contender.name
        rows.append(
            {
                "version": name + "*" * any(line.row["stale"] for line in lines.values() if line),
                **percent,
                "h. mean": _number(table.means.get(contender.name), "{:.2f}".format),
                "in %": _number(table.mean_ratio(contender.name), lambda ratio: f"{100 * ratio:.1f}"),
            }
        )
    return _tabulate(rows, format)


def _who(tables: Sequence[Table]) -> str:
    contenders = {contender.name: contender for table in tables for contender in table.contenders}.values()
    rows = [{"version": _short(each.name), "title": each.title, "description": each.idea} for each in contenders]
    return _tabulate(rows, "simple", [22, 26, 46])


def _tabulate(
    rows: list[dict[str, str]], format: str, widths: list[int | None] | None = None, groups: str | None = None
) -> str:
    """`groups`: the column whose changes get a line between the rows."""
    headers = list(rows[0])
    cells: list[list[str] | str] = []
    for before, row in zip([rows[0], *rows], rows, strict=False):
        if groups and row[groups] != before[groups]:
            cells.append(SEPARATING_LINE)
        cells.append([cell.replace("|", "\\|") if format == "github" else cell for cell in row.values()])
    if format == "simple" and widths is None:
        widths = [24 if header == "version" else None for header in headers]
    text = tabulate(
        cells,
        headers,
        tablefmt=format,
        disable_numparse=True,
        colalign=["left" if header in _LEFT else "right" for header in headers],
        maxcolwidths=widths,
    )
    return "\n".join(line.rstrip() for line in text.splitlines())


def _text(lines: list[str], format: str) -> str:
    if format == "html":
        return f"<p>{'<br>'.join(map(html.escape, lines))}</p>"
    return "  \n".join(lines) if format == "github" else "\n".join(map(wrap, lines))


def _list(items: list[str], format: str) -> str:
    if format == "html":
        return "<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in items) + "</ul>"
    if format == "github":
        return "\n".join(f"- {' '.join(item.split())}" for item in items)
    return "\n".join(map(wrap, items))


def _figures(table: Table, line: Line) -> dict[str, Any]:
    """A line as plain data for JSON and CSV."""
    shape, row, times = line.shape, line.row, line.row.get("microseconds", {})
    return {
        "gpu": table.gpu,
        "date": row["date"],
        "version": line.contender.name,
        "title": line.contender.title,
        "description": line.contender.idea,
        "batch": shape.batch,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "seq": shape.seq,
        "head_dim": shape.head_dim,
        "dtype": shape.dtype,
        "causal": shape.causal,
        "microseconds": line.microseconds,
        "microseconds_p20": times.get("p20"),
        "microseconds_p80": times.get("p80"),
        "tflops": line.tflops,
        "share_of_ceiling": line.share,
        "baseline": table.baseline,
        "delta": line.delta,
        "ratio": line.ratio,
        "spread": line.spread,
        "noise": line.noise,
        "error": row.get("error"),
        "warmup": row.get("warmup"),
        "repetitions": row.get("repetitions"),
        "gpu_state": row.get("gpu_state"),
        "stale": row["stale"],
        "note": line.note,
        "harmonic_mean_tflops": table.means.get(line.contender.name),
        "harmonic_mean_ratio": table.mean_ratio(line.contender.name),
    }


def _csv(tables: Sequence[Table]) -> str:
    text = io.StringIO()
    rows = [_figures(table, line) for table in tables for line in table.lines]
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def _json(tables: Sequence[Table], left_out: Mapping[str, str]) -> str:
    runs = {(table.gpu, line.row["date"]): line.row["run"] for table in tables for line in table.lines}
    rows = [_figures(table, line) for table in tables for line in table.lines]
    return json.dumps({"runs": list(runs.values()), "rows": rows, "left_out": left_out}, indent=2, ensure_ascii=False)
