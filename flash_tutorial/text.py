"""How tables and their notes are set: for a terminal, for a Markdown page and for HTML."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

WIDTH = 100  # columns of the terminal that text is made for


def wrap(text: str) -> str:
    """The text with its prose wrapped; lines of source, which compilers quote behind a bar, stay as they are."""
    lines = []
    for line in text.splitlines():
        if len(line) <= WIDTH or re.match(r" *\d* *\|", line):
            lines.append(line)
        else:
            indent = " " * (len(line) - len(line.lstrip()))
            lines += textwrap.wrap(
                line.strip(), WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False
            )
    return "\n".join(lines)


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """A Markdown table without padding, so that a change of one cell changes one line of a page; `align` has an l or r
    for each column."""
    rule = ["---:" if side == "r" else "---" for side in align]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headers, rule, *rows))


def page(title: str, body: str, style: str = "") -> str:
    """A page of HTML that needs nothing else; `style` adds to the CSS of its tables."""
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        "<style>body{font-family:sans-serif;color-scheme:light dark}td,th{padding:.2em .7em}"
        f"{style}</style>\n{body}\n</html>"
    )
