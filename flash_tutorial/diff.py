"""What one kernel file changed from another."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from html import escape

from flash_tutorial import registry
from flash_tutorial.versions import Version


@dataclass(frozen=True)
class Diff:
    """The unified difference of two kernel files; shows itself coloured in a notebook."""

    old: str
    new: str
    lines: tuple[str, ...]

    @property
    def added(self) -> int:
        return sum(line.startswith("+") for line in self.lines[2:])

    @property
    def removed(self) -> int:
        return sum(line.startswith("-") for line in self.lines[2:])

    @property
    def summary(self) -> str:
        return f"{self.old} → {self.new}: +{self.added} −{self.removed} lines"

    def __str__(self) -> str:
        return "\n".join([*self.lines, self.summary])

    def html(self) -> str:
        """An HTML fragment: the summary and the coloured lines."""
        shades = {"+": "#2da44e33", "-": "#cf222e33", "@": "#0969da22"}  # translucent: readable on light and dark
        lines = (
            f'<span style="display:block;background:{shades.get(line[:1], "none")}">{escape(line)}</span>'
            for line in self.lines
        )
        return f'<p>{escape(self.summary)}</p>\n<pre style="line-height:1.3">{"".join(lines)}</pre>'

    _repr_html_ = html


def diff(version: str, other: str | None = None, like: str | None = None) -> Diff:
    """What `version` (a name or a .cu's path) changed from `other`, by default from its parent.

    Raises ValueError for an unknown name, and for a version without a parent when `other` is not given.
    """
    new = registry.resolve(version, like)
    if other is None and new.parent is None:
        raise ValueError(f"{new.name} is where the ladder starts: it has no parent. Name what to hold it against")
    old = registry.resolve(other or new.parent, like)
    lines = difflib.unified_diff(
        old.source.read_text(encoding="utf-8", errors="replace").splitlines(),
        new.source.read_text(encoding="utf-8", errors="replace").splitlines(),
        _label(old),
        _label(new),
        lineterm="",
    )
    return Diff(_label(old), _label(new), tuple(lines))


def _label(version: Version) -> str:
    """A version's file name; a reader's file with its directory, as it may be called the same; a variant's name."""
    if version.settings:
        return version.name
    return os.path.relpath(version.own) if version.own else version.source.name
