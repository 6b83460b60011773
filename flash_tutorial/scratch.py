"""Scratch copies of a kernel: change a line, run it, and leave the original alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from flash_tutorial.registry import resolve


def edit(version: str | int | os.PathLike, changes: Mapping[str, str], out: str | os.PathLike | None = None) -> Path:
    """A copy of a version's kernel (or of the kernel at a path) in which each old text is replaced by its new one.

    The copy keeps the kernel's file name, so that it can be used wherever a version's name is taken; it lies in a
    temporary directory of its own, or at `out`, a file name or an existing directory.

    Raises ValueError if an old text is empty, or does not occur exactly once in the kernel.
    """
    source = resolve(version, like=0).source
    text = source.read_text(encoding="utf-8")
    edited = text
    for old, new in changes.items():
        if not old or text.count(old) != 1 or edited.count(old) != 1:
            raise ValueError(
                f"the text to replace must occur exactly once in {source.name}, "
                f"but this occurs {text.count(old) if old else 0} times:\n{old}"
            )
        edited = edited.replace(old, new)

    if out is None:
        path = Path(tempfile.mkdtemp(prefix="flash-tutorial-")) / source.name
    else:
        path = Path(out)
        if path.is_dir():
            path /= source.name
    if path.exists() and path.samefile(source):
        raise ValueError(f"out={str(out)!r} is the kernel itself: a scratch copy goes somewhere else")
    path.write_text(edited, encoding="utf-8")
    return path
