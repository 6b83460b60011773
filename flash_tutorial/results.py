"""Figures measured on GPUs, kept as JSON: when, on what, and of which kernel.

    results/<gpu>.json             times (flash_tutorial.benchmark)
    results/profiles/<gpu>.json    Nsight Compute's figures of a launch (flash_tutorial.profile)
    results/counters/<gpu>.json    the emulator's counters beside the GPU's (flash_tutorial.hardware)

A file holds the runs of one GPU, {"format", "gpu", "runs": [{"date", "environment", "rows", …}]}; a row is one
measured thing and has a "version" and, for a version, the hash of its kernel's sources: a row whose kernel has changed
since is stale.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Hashable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "results"
FORMAT = 1
_FOLDERS = {"times": ".", "profiles": "profiles", "counters": "counters"}


def environment() -> dict[str, str]:
    """What a figure depends on beside the kernel: GPU, clocks and power as found, driver, toolkit, libraries."""
    import torch

    fields = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "power.limit", "pstate")
    query = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", "0"],
        capture_output=True,
        text=True,
    )
    values = [value.strip() for value in query.stdout.strip().split(",")] if query.returncode == 0 else []
    return {
        **dict(zip(fields, values, strict=False)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "cudnn": str(torch.backends.cudnn.version()),
    }


def gpu_stem(name: str) -> str:
    """The results file's stem for a GPU: ``NVIDIA H200`` gives ``h200``."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower().removeprefix("nvidia ").removeprefix("geforce ")).strip("_")


def check(kind: str, gpu: str, folder: Path = RESULTS) -> Path:
    """The path of a GPU's results file of a kind ("times", "profiles", "counters"), after a look at whether a run can
    be added to it: to be asked before anything is measured.

    Raises ValueError if the file is damaged or of another format version, OSError if it cannot be written.
    """
    path = folder / _FOLDERS[kind] / f"{gpu_stem(gpu)}.json"
    if path.exists():
        _read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"{path.parent} cannot be written to: results are kept there")
    return path


def append(
    kind: str, rows: list[dict[str, Any]], *, where: dict[str, str] | None = None, folder: Path = RESULTS, **more: Any
) -> Path:
    """Adds one dated run to a GPU's results file of a kind, atomically, and returns the file's path.

    where  the run's environment; None: this machine's, now
    more   further facts of the run, such as the ceilings measured with it

    Raises what `check` does, leaving the file as it was.
    """
    where = environment() if where is None else where
    path = check(kind, where["name"], folder)
    document = _read(path) if path.exists() else {"format": FORMAT, "gpu": where["name"], "runs": []}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    document["runs"].append({"date": date, "environment": where, **more, "rows": rows})
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        json.dump(document, file, indent=1)
        file.write("\n")
    os.replace(file.name, path)
    return path


def runs(kind: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Every run of a kind, of all GPUs, oldest first, each with its "gpu".

    Raises ValueError if a file is damaged or of another format version.
    """
    found = []
    for path in sorted((folder / _FOLDERS[kind]).glob("*.json")):
        document = _read(path)
        found += [{**run, "gpu": document["gpu"]} for run in document["runs"]]
    return sorted(found, key=lambda run: run["date"])


def newest(kind: str, key: Callable[[dict[str, Any]], Hashable], folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The newest row of every GPU, version and `key(row)`, each with its run's "gpu" and "date", and "stale": whether
    its kernel has changed since, or is gone."""
    rows = {}
    for run in runs(kind, folder):
        for row in run["rows"]:
            rows[run["gpu"], row["version"], key(row)] = {**row, "gpu": run["gpu"], "date": run["date"]}
    current = {row["version"]: kernel_hash(row["version"]) for row in rows.values() if "kernel_hash" in row}
    for row in rows.values():
        row["stale"] = "kernel_hash" in row and row["kernel_hash"] != current[row["version"]]
    return list(rows.values())


def kernel_hash(name: str) -> str | None:
    """The hash of a version's, or variant's, sources as they are now; None if there is none of this name."""
    from flash_tutorial import build, registry

    try:
        return build.source_hash(registry.resolve(name))
    except (ValueError, build.BuildError):
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); mend or remove it") from error
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path} has results format {found!r}; this version reads format {FORMAT}")
    return document
