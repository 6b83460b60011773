"""Pictures for the notebooks.

Every function takes plain numbers or NumPy arrays, mostly what the emulator counted, and returns a matplotlib
``Figure``. Nothing here measures anything, and nothing changes matplotlib's global state. Colours are Okabe and
Ito's, which readers with any of the common colour-vision deficiencies can tell apart; where a colour carries a
meaning, a number, a hatch or an outline carries it too. The background is opaque white, so that a figure reads the
same in print and in a dark theme.
"""

from __future__ import annotations

import functools
import itertools
import textwrap
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, LogLocator
from matplotlib.transforms import Bbox

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, GREY, INK = "#56B4E9", "#CC79A7", "#F0E442", "#B8B8B8", "#222222"
OWNERS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW, GREY)
CONTENDERS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, INK)  # thin lines and small dots: no yellow, no grey

BANKS, BANK_BYTES, SECTOR_BYTES = 32, 4, 32

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "hatch.linewidth": 0.6,
}


def _styled(draw):
    """Runs a drawing function under STYLE and leaves the reader's own matplotlib settings as they were."""

    @functools.wraps(draw)
    def styled(*args, **kwargs):
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return styled


def _figure(width: float, height: float, columns: int = 1, **layout) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, **layout)[0]
    return figure, list(axes)


def _tint(colour: str, strength: float) -> tuple[float, ...]:
    """The colour mixed with white; strength 1 is the colour itself."""
    return tuple(1 - strength * (1 - channel) for channel in to_rgb(colour))


def _ink_on(colour) -> str:
    """Black or white, whichever is easier to read on the colour."""
    red, green, blue = to_rgb(colour)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else INK


def _cell(
    axes: Axes,
    x: float,
    y: float,
    colour,
    text: str = "",
    *,
    width: float = 1,
    height: float = 1,
    size: float = 7,
    **patch,
) -> None:
    patch = {"edgecolor": "white", "linewidth": 0.8, **patch}
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, **patch))
    if text:
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=_ink_on(colour))


def _grid(axes: Axes, columns: float, rows: float, *, square: bool = True) -> None:
    """Matrix coordinates: row 0 at the top, no frame, a little air around."""
    axes.set(xlim=(-0.05, columns + 0.05), ylim=(rows + 0.05, -0.05), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    if square:
        axes.set_aspect("equal")


# --- who computes what ----------------------------------------------------------------------------------------------


@_styled
def tile_walk(panels: Sequence[Mapping]) -> Figure:
    """The score matrix cut into tiles: who computes each tile, and when.

    Each panel is a mapping with ``title``, ``owner`` (an integer array, tile rows x tile columns: which block
    computes the tile), ``step`` (the same shape: when that block reaches it, from 1) and, optionally, ``note`` (a
    line below).
    """
    rows = max(np.asarray(panel["owner"]).shape[0] for panel in panels)
    figure, every = _figure(2.75 * len(panels), 0.38 * rows + 1.0, len(panels))
    for axes, panel in zip(every, panels, strict=True):
        owner, step = np.asarray(panel["owner"]), np.asarray(panel["step"])
        for (i, j), block in np.ndenumerate(owner):
            _cell(axes, j, i, OWNERS[block % len(OWNERS)], str(step[i, j]), size=8)
        keys = [f"K{j} V{j}" if owner.shape[1] < 6 else f"K{j}" for j in range(owner.shape[1])]
        for i, name in enumerate(panel.get("rows", [f"Q{i}" for i in range(owner.shape[0])])):
            _cell(axes, -1.15, i, "white", name, edgecolor=INK, linewidth=0.7)
        for j, name in enumerate(panel.get("columns", keys)):
            _cell(axes, j, -0.85, "white", name, height=0.7, size=6.5, edgecolor=INK, linewidth=0.7)
        axes.set(xlim=(-1.25, owner.shape[1] + 0.1), ylim=(rows + 0.1, -1.0), xticks=[], yticks=[], aspect="equal")
        axes.spines[:].set_visible(False)
        axes.set_title(panel["title"])
        axes.set_xlabel(panel.get("note", ""), fontsize=8)
    return figure


@_styled
def element_owners(warp: np.ndarray, lane: np.ndarray, *, follow: int, title: str, rows: str, columns: str) -> Figure:
    """One tile, element by element: its colour says which warp computes it, its number which lane.

    ``warp`` and ``lane`` are integer arrays of the tile's shape; ``rows`` and ``columns`` say what runs along them.
    The elements of lane ``follow`` of the first element's warp are outlined.
    """
    height, width = warp.shape
    figure, (axes,) = _figure(7.4, max(1.9, 6.3 * height / width + 0.7))
    for (i, j), owner in np.ndenumerate(warp):
        mine = owner == warp.flat[0] and lane[i, j] == follow
        colour = OWNERS[owner % len(OWNERS)]
        _cell(axes, j, i, colour if mine else _tint(colour, 0.35), str(lane[i, j]), size=5.5, linewidth=0.4)
        if mine:
            axes.add_patch(Rectangle((j + 0.05, i + 0.05), 0.9, 0.9, fill=False, edgecolor=INK, linewidth=1.2))
    _grid(axes, width, height)
    axes.set(title=title, xlabel=f"{columns} →", ylabel=f"← {rows}")
    return figure


@_styled
def storage(boxes: Sequence[Mapping]) -> Figure:
    """What lives where while a kernel runs: one row for each kind of memory, one box for each array in it.

    Each box is a mapping with ``memory`` (``"registers"``, ``"shared"`` or ``"global"``), ``name``, ``shape`` (text)
    and ``bytes`` (per block; ``None`` where it does not apply); ``new`` marks what changed from the parent version.
    """
    kinds = [kind for kind in ("registers", "shared", "global") if any(box["memory"] == kind for box in boxes)]
    colours = {"registers": GREEN, "shared": ORANGE, "global": SKY}
    most = max(sum(box["memory"] == kind for box in boxes) for kind in kinds)
    figure, (axes,) = _figure(7.4, 0.78 * len(kinds) + 0.15)
    for row, kind in enumerate(kinds):
        axes.text(-0.06, row + 0.44, kind, ha="right", va="center", fontsize=9)
        for column, box in enumerate(box for box in boxes if box["memory"] == kind):
            new = box.get("new", False)
            colour = _tint(colours[kind], 0.6)
            _cell(
                axes,
                column,
                row,
                colour,
                width=0.94,
                height=0.88,
                edgecolor=INK if new else "white",
                linewidth=1.6 if new else 0.8,
                hatch="//" if new else None,
            )
            size = "" if box.get("bytes") is None else f"\n{box['bytes']:,} B"
            axes.text(
                column + 0.47,
                row + 0.44,
                f"{box['name']}\n{box['shape']}{size}",
                ha="center",
                va="center",
                fontsize=7.5,
                bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.0},
            )
    _grid(axes, most, len(kinds), square=False)
    axes.set_xlim(-0.75, most)
    return figure


# --- memory accesses of one warp ------------------------------------------------------------------------------------


@_styled
def bank_map(
    patterns: Mapping[str, np.ndarray], *, width: int = 4, wavefronts: Mapping[str, int] | None = None
) -> Figure:
    """Which bank of shared memory each lane of a warp touches, one panel for each pattern.

    ``patterns`` maps a title to the byte offset of each lane (-1: the lane is inactive); each lane reads ``width``
    bytes. A column is a bank, a cell one 4-byte word, its number the first lane that asks for it. A bank asked for
    more different words than its share is drawn in vermilion and hatched: each needs a wavefront. ``wavefronts``, what
    the emulator counted, goes into the titles. Rows of shared memory that nobody touches are left out.
    """
    figure = Figure(figsize=(7.4, 0.2), layout="constrained")
    heights = []
    words = {}
    for title, offsets in patterns.items():
        touched: dict[int, int] = {}
        for lane, offset in enumerate(offsets):
            if offset >= 0:
                for word in range(int(offset) // BANK_BYTES, (int(offset) + width - 1) // BANK_BYTES + 1):
                    touched.setdefault(word, lane)
        words[title] = touched
        rows = len({word // BANKS for word in touched})
        heights.append((rows if rows <= 8 else 0.6 * rows) + 1.6)
    figure.set_size_inches(7.4, 0.205 * sum(heights) + 0.35)
    every = figure.subplots(len(patterns), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, touched) in zip(every, words.items(), strict=True):
        rows = sorted({word // BANKS for word in touched})
        per_bank = np.bincount([word % BANKS for word in touched], minlength=BANKS)
        share = -(-len(touched) // BANKS)  # of each bank, if the words were spread over all of them
        for row, memory_row in enumerate(rows):
            for bank in range(BANKS):
                lane = touched.get(memory_row * BANKS + bank)
                crowded = per_bank[bank] > share
                if lane is None:
                    _cell(axes, bank, row, "#F2F2F2", linewidth=0.5)
                else:
                    colour = _tint(VERMILION, 0.75) if crowded else SKY
                    _cell(axes, bank, row, colour, hatch="////" if crowded else None, linewidth=0.5)
                    label = {"facecolor": colour, "edgecolor": "none", "pad": 0.6}
                    centre = {"ha": "center", "va": "center", "fontsize": 6 if len(rows) <= 8 else 5}
                    axes.text(bank + 0.5, row + 0.5, str(lane), bbox=label, **centre)
        counted = (
            "" if wavefronts is None else f": {wavefronts[title]} wavefront{'s' if wavefronts[title] != 1 else ''}"
        )
        _grid(axes, BANKS, len(rows), square=False)
        axes.set_title(f"{title}{counted}", pad=3)
        axes.set_ylabel("words", fontsize=7)
        axes.set_xticks(np.arange(0.5, BANKS), [str(bank) for bank in range(BANKS)], fontsize=6)
        axes.tick_params(length=0, pad=1)
    every[-1].set_xlabel("bank (4 bytes wide); the number in a cell is the lane that asks for that word", fontsize=8)
    return figure


@_styled
def sector_map(
    patterns: Mapping[str, np.ndarray], *, width: int = 4, sectors: Mapping[str, int] | None = None
) -> Figure:
    """Which 32-byte sectors of global memory one request of a warp fetches, one panel for each pattern.

    ``patterns`` maps a title to the byte offset of each lane; each lane reads ``width`` bytes. Blue bytes were asked
    for, grey hatched ones come along because memory is fetched in whole sectors. ``sectors``, what the emulator
    counted, goes into the titles. Only touched sectors are drawn, sixteen to a row.
    """
    drawn = {}
    for title, offsets in patterns.items():
        used = np.unique(np.concatenate([np.arange(o, o + width) for o in np.asarray(offsets) if o >= 0]))
        drawn[title] = (used, np.unique(used // SECTOR_BYTES))
    per_row = 16
    heights = [int(np.ceil(len(touched) / per_row)) + 1.1 for _, touched in drawn.values()]
    figure = Figure(figsize=(7.4, 0.3 * sum(heights) + 0.3), layout="constrained")
    every = figure.subplots(len(drawn), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, (used, touched)) in zip(every, drawn.items(), strict=True):
        for index, sector in enumerate(touched):
            x, y = index % per_row, index // per_row
            _cell(
                axes, x + 0.03, y, "#DADADA", width=0.94, height=0.8, hatch="//////", edgecolor="#9A9A9A", linewidth=0
            )
            within = used[used // SECTOR_BYTES == sector] % SECTOR_BYTES
            for start in within[::BANK_BYTES]:
                _cell(
                    axes,
                    x + 0.03 + 0.94 * start / SECTOR_BYTES,
                    y,
                    BLUE,
                    width=0.94 * BANK_BYTES / SECTOR_BYTES,
                    height=0.8,
                    linewidth=0.4,
                )
        counted = len(touched) if sectors is None else sectors[title]
        share = len(used) / (len(touched) * SECTOR_BYTES)
        _grid(axes, per_row, np.ceil(len(touched) / per_row), square=False)
        axes.set_title(f"{title}: {counted} sector{'s' if counted != 1 else ''}, {share:.0%} of the bytes used", pad=3)
    every[-1].set_xlabel("one box: a sector of 32 bytes; blue: asked for, hatched: fetched all the same", fontsize=8)
    return figure


# --- what happens when ----------------------------------------------------------------------------------------------

#: The kinds of a timeline's bars: what the legend calls each, its colour and hatch.
SPANS = {
    "copy": ("a copy is under way", _tint(SKY, 0.45), "////"),
    "kept": ("there, or in use", _tint(SKY, 0.45), None),
    "product": ("product", BLUE, None),
    "softmax": ("softmax", ORANGE, None),
    "wait": ("waits for a copy", "white", "xxxx"),
}


@_styled
def timeline(panels: Mapping[str, Sequence[Mapping]], *, unit: str) -> Figure:
    """What happens when: a panel for each schedule, in it a row for each thing that can be busy.

    ``panels`` maps a title to bars, each a mapping with ``row`` (its name), ``start`` and ``end`` in ``unit``, ``kind``
    (one of `SPANS`) and ``text``. Rows come in the order in which their names do. Raises ValueError for two bars of a
    row that overlap.
    """
    rows = {title: list(dict.fromkeys(bar["row"] for bar in bars)) for title, bars in panels.items()}
    figure = Figure(figsize=(7.4, 0.27 * sum(map(len, rows.values())) + 0.42 * len(panels) + 0.7), layout="constrained")
    heights = [len(names) + 1 for names in rows.values()]
    every = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axes, (title, bars) in zip(every, panels.items(), strict=True):
        names = rows[title]
        for name in names:
            own = sorted((bar["start"], bar["end"]) for bar in bars if bar["row"] == name)
            if any(end > start for (_, end), (start, _) in itertools.pairwise(own)):
                raise ValueError(f"{title}: two bars of the row {name} overlap")
        for bar in bars:
            _, colour, hatch = SPANS[bar["kind"]]
            x, y, width = bar["start"], names.index(bar["row"]), bar["end"] - bar["start"]
            _cell(axes, x, y + 0.06, colour, width=width, height=0.88, hatch=hatch, edgecolor=INK, linewidth=0.6)
            if bar["text"]:
                label = {"facecolor": colour, "edgecolor": "none", "pad": 0.8}
                centre = {"ha": "center", "va": "center", "fontsize": 6.5, "color": _ink_on(colour)}
                axes.text(x + width / 2, y + 0.5, bar["text"], bbox=label, **centre)
        axes.set(
            title=title, ylim=(len(names), 0), xlim=(0, max(bar["end"] for bars in panels.values() for bar in bars))
        )
        axes.set_yticks(np.arange(0.5, len(names)), names, fontsize=7.5)
        axes.tick_params(axis="y", length=0)
    every[-1].set_xlabel(unit)
    used = {bar["kind"] for bars in panels.values() for bar in bars}
    handles = {
        words: Rectangle((0, 0), 1, 1, facecolor=colour, hatch=hatch, edgecolor=INK, linewidth=0.6)
        for kind, (words, colour, hatch) in SPANS.items()
        if kind in used
    }
    figure.legend(handles.values(), handles, loc="outside upper left", ncols=len(handles), frameon=False, fontsize=8)
    return figure


# --- tensor-core fragments ------------------------------------------------------------------------------------------


@_styled
def fragment_map(fragments: Mapping[str, tuple[np.ndarray, np.ndarray]], *, follow: int = 5) -> Figure:
    """Which lane holds which element of each operand of one ``mma``, and in which of its registers' halves.

    ``fragments`` maps a title to two integer arrays of the operand's shape: the lane, and the element's index within
    that lane's fragment. Lane ``follow``'s elements are outlined and labelled with that index.
    """
    shapes = [lane.shape for lane, _ in fragments.values()]
    figure = Figure(figsize=(7.6, 0.21 * max(rows for rows, _ in shapes) + 0.75), layout="constrained")
    every = figure.subplots(1, len(shapes), squeeze=False, width_ratios=[columns for _, columns in shapes])[0]
    for axes, (title, (lane, index)) in zip(every, fragments.items(), strict=True):
        rows, columns = lane.shape
        for (i, j), holder in np.ndenumerate(lane):
            colour = _tint(OWNERS[holder // 4 % len(OWNERS)], 0.55)
            if holder == follow:
                _cell(axes, j, i, colour, f"{holder}:{index[i, j]}", size=5.5, edgecolor=INK, linewidth=1.3, zorder=3)
            else:
                _cell(axes, j, i, colour, str(holder), size=5.5, linewidth=0.4)
        _grid(axes, columns, rows)
        axes.set_title(title)
        axes.set_xticks(np.arange(0.5, columns, 2), range(0, columns, 2), fontsize=6)
        axes.set_yticks(np.arange(0.5, rows, 2), range(0, rows, 2), fontsize=6)
        axes.tick_params(length=0, pad=1)
    return figure


# --- numbers --------------------------------------------------------------------------------------------------------


@_styled
def online_softmax(scores: np.ndarray, tile: int, maxima: Sequence[float], sums: Sequence[float]) -> Figure:
    """One row of scores read tile by tile: the running maximum, and the running sum before and after its rescaling.

    ``scores`` is the row; ``maxima`` and ``sums`` the state after each tile of ``tile`` scores.
    """
    figure = Figure(figsize=(7.4, 3.1), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    keys = np.arange(len(scores))
    edges = np.append(keys[::tile], len(scores))
    shade = [SKY if key // tile % 2 else BLUE for key in keys]
    top.scatter(keys, scores, color=shade, s=16)
    top.step(edges, np.append(maxima, maxima[-1]), where="post", color=VERMILION, linewidth=1.8)
    top.text(edges[-1] + 0.4, maxima[-1], "running\nmaximum m", color=VERMILION, va="top", fontsize=8)
    top.set_ylabel("score (no unit)")
    bottom.step(edges, np.append(sums, sums[-1]), where="post", color=GREEN, linewidth=1.8)
    before = [0.0, *sums[:-1]]
    factors = np.exp(np.array([-np.inf, *maxima[:-1]]) - np.array(maxima))
    for edge, old, factor in zip(edges[1:-1], before[1:], factors[1:], strict=True):
        if factor < 1:
            bottom.annotate(f"×{factor:.2g}", (edge, old), textcoords="offset points", xytext=(4, -10), fontsize=7.5)
    bottom.text(edges[-1] + 0.4, sums[-1], "running\nsum l", color=GREEN, va="center", fontsize=8)
    bottom.set(
        xlabel=f"key (a tile is {tile} keys)",
        ylabel="Σ exp(s − m)",
        xlim=(-0.8, len(scores) * 1.13),
        xticks=edges,
        ylim=(0, 1.25 * max(sums)),
    )
    return figure


def _engineering(value: float, _position=None) -> str:
    for factor, suffix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{suffix}"
    return f"{value:.3g}"


@_styled
def bars(groups: Mapping[str, Mapping[str, float]], *, unit: str, log: bool = False) -> Figure:
    """Horizontal bars: ``groups`` maps a row's label to its bars, each a name and a value in ``unit``."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    figure, (axes,) = _figure(7.4, 0.19 * sum(len(group) + 1 for group in groups.values()) + 0.8)
    largest = max(value for group in groups.values() for value in group.values())
    y, ticks = 0.0, []
    for group in groups.values():
        ticks.append(y + (len(group) - 1) / 2)
        for name, value in group.items():
            colour = OWNERS[names.index(name) % len(OWNERS)]
            axes.barh(y, value, height=0.86, color=colour, label=name)
            axes.annotate(
                _engineering(value), (value, y), textcoords="offset points", xytext=(3, 0), va="center", fontsize=7
            )
            y += 1
        y += 0.8
    axes.set_yticks(ticks, list(groups))
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    if log:
        axes.set_xscale("log")
        axes.set_xlim(right=largest * 3)
    else:
        axes.set_xlim(0, largest * 1.12)
    axes.xaxis.set_major_formatter(FuncFormatter(_engineering))
    if len(names) > 1:
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        figure.legend(
            [handles[name] for name in names],
            names,
            loc="outside upper left",
            ncols=4 if len(names) == 4 else 3 if len("".join(names)) < 100 else 2,
            frameon=False,
            fontsize=8,
        )
    return figure


def _put_labels(axes: Axes, labels: Sequence[tuple[str, tuple[float, float]]], lines: Sequence[np.ndarray]) -> None:
    """Writes each text beside its point, where it covers no other text, no point and, if it can, none of ``lines``.

    ``lines`` are (n, 2) arrays of data coordinates. A text that finds no room close by is moved away and tied to its
    point by a thin line. To be called last: it looks at where everything else has come to lie.
    """
    figure = axes.get_figure()
    figure.draw_without_rendering()
    unit = figure.dpi / 72  # pixels
    place, frame = axes.transData.transform, axes.get_window_extent()
    taken = [text.get_window_extent() for text in axes.texts]
    taken += [
        Bbox.from_bounds(x - 4 * unit, y - 4 * unit, 8 * unit, 8 * unit) for x, y in place([at for _, at in labels])
    ]
    path = np.concatenate([place(line) for line in lines])
    directions = ((1, 0), (-1, 0), (1, -1), (1, 1), (-1, -1), (-1, 1), (0, 1), (0, -1))
    places = list(itertools.product((7, 14, 22, 32, 44, 60, 80), directions))
    offset = {"textcoords": "offset points", "fontsize": 7.5, "va": "center"}
    for text, at in sorted(labels, key=lambda label: label[1][::-1]):
        note = axes.annotate(text, at, (0, 0), **offset, zorder=4)
        note.set_in_layout(False)

        def cost(candidate: tuple[int, tuple[int, int]]) -> float:
            _move(note, candidate)
            box = note.get_window_extent().padded(unit)
            covers = any(box.overlaps(other) for other in taken) or not frame.contains(*box.min)
            return (
                1000 * (covers or not frame.contains(*box.max))
                + 25 * box.count_contains(path).clip(max=1)
                + candidate[0]
            )

        distance, direction = min(places, key=cost)
        _move(note, (distance, direction))
        taken.append(note.get_window_extent().padded(unit))
        if distance > places[0][0]:
            tie = {"arrowstyle": "-", "color": GREY, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4}
            axes.annotate("", at, note.get_position(), **offset, arrowprops=tie).set_in_layout(False)


def _move(note: Annotation, place: tuple[int, tuple[int, int]]) -> None:
    """Puts a text so many points away from what it is about, to the right or left, above or below it."""
    distance, (right, up) = place
    note.set(position=(right * distance, up * distance), ha=("center", "left", "right")[right])


@_styled
def roofline(
    panels: Mapping[str, tuple[float, Mapping[str, Mapping]]],
    *,
    ceilings: Mapping[str, float],
    roof: str,
    notes: Sequence[str] = (),
) -> Figure:
    """Arithmetic intensity against the roofs of one chip, one panel for each kind of memory.

    ``panels`` maps a memory's name to its bandwidth in byte/s and its points by name. A point is a mapping with
    ``intensity`` (FLOP for each byte that the memory moves), ``achieved`` (FLOP/s; ``None``, not measured, puts a
    triangle on the roof), ``ceiling`` (the name of the roof that its arithmetic has) and, optionally, ``counted`` (its
    bytes are counted, not measured: a ring). ``ceilings`` maps a kind of arithmetic to its FLOP/s; ``roof`` says whose
    they are, ``notes`` are lines below the figure.
    """
    notes = _wrapped(notes)
    figure, every = _figure(7.4, (3.3 if len(panels) > 1 else 4.2) + 0.16 * len(notes), len(panels), sharey=True)
    names = list(dict.fromkeys(name for _, points in panels.values() for name in points))
    tera, highest = 1e-12, max(ceilings.values())
    drawn = []
    for axes, (memory, (bandwidth, points)) in zip(every, panels.items(), strict=True):
        used = [point["intensity"] for point in points.values()] + [flops / bandwidth for flops in ceilings.values()]
        left, right = min(used) / 6, max(used) * 5
        slope = np.geomspace(left, highest / bandwidth, 200)
        lines = [np.column_stack([slope, bandwidth * slope * tera])]
        for name, flops in ceilings.items():
            flat = np.geomspace(flops / bandwidth, right, 200)
            lines.append(np.column_stack([flat, np.full_like(flat, flops * tera)]))
            words = f"{name}: {flops * tera:.3g} TFLOP/s"
            above = {"textcoords": "offset points", "xytext": (0, 3), "ha": "right", "fontsize": 7.5}
            axes.annotate(words, (right, flops * tera), **above)
        for line in lines:
            axes.loglog(*line.T, color=INK, linewidth=1.6)
        middle = (left * highest / bandwidth) ** 0.5
        labels: dict[tuple[float, float], list[str]] = {}  # what lies at one place shares a label
        labels[middle, bandwidth * middle * tera] = [f"{bandwidth * tera:.3g} TB/s"]
        for name, point in points.items():
            ceiling = min(ceilings[point["ceiling"]], bandwidth * point["intensity"])
            height = point["achieved"] or ceiling
            axes.plot([point["intensity"]] * 2, [height * tera, ceiling * tera], color=GREY, linewidth=1, linestyle=":")
            colour = CONTENDERS[names.index(name) % len(CONTENDERS)]
            axes.plot(
                point["intensity"],
                height * tera,
                marker="o" if point["achieved"] else "^",
                markersize=7,
                markerfacecolor="white" if point.get("counted") else colour,
                markeredgecolor=colour if point.get("counted") else "white",
                markeredgewidth=1.8 if point.get("counted") else 1.0,
                linestyle="none",
                zorder=3,
            )
            labels.setdefault((point["intensity"], height * tera), []).append(name)
        axes.set(title=f"{roof}: {memory}", xlabel="FLOP per byte moved", xlim=(left, right))
        axes.grid(True, which="major", color="#E4E4E4", linewidth=0.6)
        axes.xaxis.set_major_formatter(FuncFormatter(_engineering))
        axes.yaxis.set_major_formatter(FuncFormatter(_engineering))
        drawn.append((axes, [(", ".join(who), at) for at, who in labels.items()], lines))
    every[0].set_ylabel("TFLOP/s")
    every[0].set_ylim(every[0].get_ylim()[0] / 1.5, highest * tera * 2.5)
    _below(figure, notes)
    for axes, labels, lines in drawn:
        _put_labels(axes, labels, lines)
    return figure


def _wrapped(notes: Sequence[str]) -> list[str]:
    """Notes as lines that are no wider than a figure."""
    return [line for note in notes for line in textwrap.wrap(note, 120)]


def _below(figure: Figure, notes: Sequence[str]) -> None:
    """Lines of small print under everything else."""
    if notes:
        figure.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=7.5)


@_styled
def speeds(panels: Mapping[str, Mapping[str, Mapping]], *, notes: Sequence[str] = ()) -> Figure:
    """TFLOP/s over the sequence length, one panel for each family of problems, a line for each contender by name.

    A line is a mapping with ``lengths``, ``median``, ``low`` and ``high`` (TFLOP/s at each length: the band around the
    line), ``stale`` (at each length: measured before the kernel's last change, a hollow dot) and ``reference`` (no
    version of the ladder: dashed). Its name stands at its right end; ``notes`` are lines below the figure.
    The scale is logarithmic where the fastest is more than 20 times as fast as the slowest.
    """
    notes = _wrapped(notes)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    most = max(len(lines) for lines in panels.values())
    figure = Figure(figsize=(7.4, rows * max(2.9, 0.15 * most + 1.0) + 0.16 * len(notes)), layout="constrained")
    every = figure.subplots(rows, columns, squeeze=False)
    for axes in every.flat[len(panels) :]:
        axes.set_axis_off()
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    for axes, (title, lines) in zip(every.flat, panels.items()):
        for name, line in lines.items():
            index = names.index(name)
            colour = CONTENDERS[index % len(CONTENDERS)]
            axes.fill_between(line["lengths"], line["low"], line["high"], color=_tint(colour, 0.3), linewidth=0)
            style = {"color": colour, "linestyle": "--" if line["reference"] else "-", "linewidth": 1.4}
            axes.plot(line["lengths"], line["median"], **style, zorder=2)
            for stale in (False, True):
                at = [i for i, old in enumerate(line["stale"]) if old == stale]
                axes.plot(
                    [line["lengths"][i] for i in at],
                    [line["median"][i] for i in at],
                    marker="osD^v"[index % 5],
                    markersize=4.5,
                    color=colour,
                    markerfacecolor="white" if stale else colour,
                    linestyle="none",
                    zorder=3,
                )
        lengths = sorted({length for line in lines.values() for length in line["lengths"]})
        speeds = [speed for line in lines.values() for speed in line["median"]]
        axes.set_xscale("log", base=2)
        if max(speeds) > 20 * min(speeds):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(speeds) < 100 * min(speeds) else (1,)))
        else:
            axes.set_ylim(0, max(speeds) * 1.08)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=7.5 if columns == 1 else 6.5)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(FuncFormatter(_engineering))
        axes.grid(True, axis="y", color="#E4E4E4", linewidth=0.6)
        axes.set(title=title, xlabel="length M = N", ylabel="TFLOP/s")
    _below(figure, notes)
    for axes, lines in zip(every.flat, panels.values()):
        _name_ends(axes, {name: (line["lengths"][-1], line["median"][-1]) for name, line in lines.items()}, names)
    return figure


def _name_ends(axes: Axes, ends: Mapping[str, tuple[float, float]], names: Sequence[str]) -> None:
    """Writes the names of lines right of the axes, each as close to its line's end as the others allow."""
    notes = {}
    for name, end in ends.items():
        colour = CONTENDERS[names.index(name) % len(CONTENDERS)]
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5)}
        where = {"xytext": (1.04, 0.5), "textcoords": "axes fraction", "va": "center", "annotation_clip": False}
        notes[name] = axes.annotate(name, end, fontsize=7.5, arrowprops=arrow, **where)
    axes.get_figure().draw_without_rendering()  # the layout has made room for the names: where do the lines end?
    to_fraction = axes.transData + axes.transAxes.inverted()
    height = {name: to_fraction.transform(end)[1] for name, end in ends.items()}
    order = sorted(ends, key=lambda name: (height[name], name))
    gap = 9.5 * axes.get_figure().dpi / 72 / axes.get_window_extent().height
    for name, y in zip(order, _apart([height[name] for name in order], gap), strict=True):
        notes[name].set_position((1.04, y))


def _apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Heights from 0 to 1, ``gap`` or more apart and else as close to the wanted ones, which ascend, as can be."""
    blocks: list[tuple[float, int]] = []  # those that touch stand together, around the mean of what they want
    for i, height in enumerate(wanted):
        blocks.append((height - i * gap, 1))
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1] = blocks[-1][0] + total, blocks[-1][1] + count
    lowest = np.array([total / count for total, count in blocks for _ in range(count)])
    return list(lowest.clip(0, max(1 - (len(wanted) - 1) * gap, 0)) + gap * np.arange(len(wanted)))
