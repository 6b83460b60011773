"""Files that are there as a whole or, whatever happens while they are written, as they were before."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to: the file there takes the place of `path` at the end, and goes after an exception."""
    draft = path.with_name(f".{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Writes a file of text as a whole. Raises OSError where it cannot."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
