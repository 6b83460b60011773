"""What each decision of a version is worth: its variants' stored times beside its own, and beside published figures.

    ablation.of("v04").markdown()       # the table of README.md and of v04's notebook

A variant (`v04:pad=0`) takes back one decision of its version, or takes another. It is compared with its version as
measured in the same run: `flash-tutorial bench v04 v04:pad=0` makes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flash_tutorial import registry, results, suites
from flash_tutorial.clock import Timing
from flash_tutorial.suites import Shape
from flash_tutorial.text import markdown
from flash_tutorial.versions import Version

# What others published: shares carry over from GPU to GPU, times do not.

#: A repository of kernels that correspond to v00 to v04 of this ladder; what it gained from its fourth to its fifth.
PEDAGOGICAL = (
    "the pedagogical reference, fp32 kernels with the ideas of v00 to v04, at B=4, H=12, M=N=2048, D=64 on an "
    "RTX 4080, each step on top of the one before"
)


@dataclass(frozen=True)
class Effect:
    """What one decision did to the time of a kernel elsewhere."""

    change: float | None  # -0.255: 25.5 % less time; None where the source gives no figure
    source: str
    note: str = ""  # what else the source says of it


#: By the variant that takes the decision back or, as with `unroll`, takes it where the version does not.
EFFECTS: Mapping[str, Effect] = {
    "v04_vectorized:copies=scalar": Effect(-0.069, PEDAGOGICAL),
    "v04_vectorized:pad=0": Effect(-0.255, PEDAGOGICAL),
    "v04_vectorized:index=64bit": Effect(-0.291, PEDAGOGICAL),
    "v04_vectorized:unroll=all": Effect(
        None, PEDAGOGICAL, "slower: 91 registers instead of 80, so that an SM holds two blocks instead of three"
    ),
}


@dataclass(frozen=True)
class Row:
    """One variant beside its version: microseconds where a run has both, else None."""

    variant: Version
    time: Timing | None
    base: Timing | None  # the version's own in the same run
    stale: bool  # one of the two kernels has changed since

    @property
    def label(self) -> str:
        """As a reader types it: v04:pad=0."""
        return registry.short(self.variant.name)

    @property
    def change(self) -> float | None:
        """The variant's time against the version's: 0.3 is 30 % more."""
        return self.time and self.time.median / self.base.median - 1

    @property
    def saved(self) -> float | None:
        """The version's time against the variant's, as published figures count: -0.25 is a quarter less."""
        return self.time and self.base.median / self.time.median - 1

    @property
    def noise(self) -> bool:
        """Whether the two differ by less than the larger of their spreads, as in `flash-tutorial bench`'s tables."""
        return bool(self.time) and self.time.noise(self.base)


@dataclass(frozen=True)
class Ablation:
    """The variants of one version, at one problem on one GPU."""

    version: Version
    rows: tuple[Row, ...]
    gpu: str | None  # None: nothing is measured
    date: str | None  # of the newest figure
    shape: Shape | None

    @property
    def elsewhere(self) -> dict[str, Effect]:
        """What others published on its variants, by their labels."""
        found = {row.label: EFFECTS.get(row.variant.name) for row in self.rows}
        return {label: effect for label, effect in found.items() if effect}

    def markdown(self) -> str:
        """A table, and below it what was measured on what, what is noise, and what measures the rest."""
        if not self.rows:
            return f"{self.version.name} has no variants."
        short = registry.short(self.version.name)
        theirs = self.elsewhere
        base = next((f"{row.base.median:,.0f}" for row in self.rows if row.base), "–")
        headers = ["variant", "what it decides", "µs", f"Δ against {short}", f"what {short} saves", "elsewhere"]
        table = [[short, "", base, "", "", ""]]
        for row in self.rows:
            cells = ["–", "–", "–"]
            if row.time:
                noise = " (noise)" if row.noise else ""
                cells = [
                    f"{row.time.median:,.0f}{'*' if row.stale else ''}",
                    f"{_percent(row.change)}{noise}",
                    f"{_percent(row.saved)}{noise}",
                ]
            effect = theirs.get(row.label)
            cells.append("" if effect is None else "slower" if effect.change is None else _percent(effect.change))
            table.append([f"`{row.label}`", _decides(row.variant), *cells])
        width = len(headers) if theirs else len(headers) - 1
        shown = markdown(headers[:width], [cells[:width] for cells in table], "llrrrr"[:width])
        return f"{shown}\n\n{' '.join(self._notes(short))}"

    def _notes(self, short: str) -> list[str]:
        notes = []
        if self.gpu:
            notes.append(
                f"Medians on {self.gpu} ({self.date[:10]}), {self.shape}; {short} in the same run. "
                "A difference is noise where it is smaller than the spread of one of the two, half of what lies "
                "between the 20th and the 80th percentile."
            )
        if any(row.stale for row in self.rows):
            notes.append("An asterisk: measured before one of the two kernels was last changed.")
        for source in dict.fromkeys(effect.source for effect in self.elsewhere.values()):
            notes.append(f"Elsewhere: what the same decision saved in {source}.")
            notes += [
                f"There, what `{label}` tries was {effect.note}."
                for label, effect in self.elsewhere.items()
                if effect.source == source and effect.note
            ]
        missing = [row.label for row in self.rows if not row.time]
        if missing:
            command = f"bench {' '.join([short, *missing])} --suite {_suite(self.version)} --only"
            notes.append(f"What has no time yet, `flash-tutorial {command}` measures on a GPU.")
        return notes


def _suite(version: Version) -> str:
    """The suite whose largest problem shows what a version's decisions are worth."""
    return next(name for name in ("pedagogical", "blog") if suites.SUITES[name].dtype in version.dtypes)


def _percent(change: float) -> str:
    return f"{100 * change:+.1f} %".replace("-", "−")


def _decides(variant: Version) -> str:
    """A variant's settings in words: "floats that a thread copies at a time: scalar instead of vector"."""
    options = {option.name: option for option in variant.options}
    return "; ".join(
        f"{options[name].meaning}: {word} instead of {options[name].words[0]}" for name, word in variant.settings
    )


def of(version: str | Version, gpu: str | None = None) -> Ablation:
    """The ablation of a version: every variant that sets one option, and every other one that has been measured.

    gpu  whose figures, by name or by that of its file in results/; None: the one that variants were measured on last

    All rows are of one problem: the one for which most of the variants have times, of several the largest without mask.
    Raises ValueError for an unknown version or GPU, for a variant, and for damaged results.
    """
    version = registry.resolve(version)
    pairs = _pairs(version.name)
    gpu = results.find_gpu("times", gpu) if gpu is not None else next(reversed(pairs), None)
    times = pairs.get(gpu, {})
    single = [f"{version.name}:{option.name}={word}" for option in version.options for word in option.words[1:]]
    variants = {name: registry.resolve(name) for name in single}
    variants |= {name: variant for name in sorted(times) if name not in single and (variant := _resolved(name))}
    shape = suites.most_common({name: times.get(name, {}) for name in variants})
    found = {name: times.get(name, {}).get(shape, ()) for name in variants}
    results.mark_stale([each for pair in found.values() for each in pair])
    rows, dates = [], []
    for name, pair in found.items():
        timings = [Timing.of(each) for each in pair] or [None, None]
        dates += [each["date"] for each in pair]
        rows.append(Row(variants[name], *timings, any(each["stale"] for each in pair)))
    return Ablation(version, tuple(rows), gpu if dates else None, max(dates, default=None), shape)


_Pair = tuple[dict[str, Any], dict[str, Any]]  # the row of a variant, and that of its version in the same run


def _pairs(version: str) -> dict[str, dict[str, dict[Shape, _Pair]]]:
    """By GPU, the one measured last at the end, then by variant and problem: the newest pair."""
    found: dict[str, dict[str, dict[Shape, _Pair]]] = {}
    for run in results.runs("times"):
        rows = {(row["version"], Shape.of(row)): row for row in run["rows"] if "microseconds" in row}
        for (name, shape), row in rows.items():
            base = rows.get((version, shape))
            if name.startswith(f"{version}:") and base:
                found[run["gpu"]] = found.pop(run["gpu"], {})
                found[run["gpu"]].setdefault(name, {})[shape] = tuple(
                    {**each, "date": run["date"]} for each in (row, base)
                )
    return found


def _resolved(name: str) -> Version | None:
    """The variant of a name that was measured; None if its version no longer has the option, or the value."""
    try:
        return registry.resolve(name)
    except ValueError:
        return None
