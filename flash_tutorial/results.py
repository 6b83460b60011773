"""Figures measured on GPUs, kept as JSON: when, on what, and of which kernel.

    results/<gpu>.json             times (flash_tutorial.benchmark), and the ceilings measured beside them
    results/profiles/<gpu>.json    Nsight Compute's figures of a launch (flash_tutorial.profile)
    results/counters/<gpu>.json    the emulator's counters beside the GPU's (flash_tutorial.hardware)
    results/tuning/<gpu>.json      times of a version's tile shapes (flash_tutorial.tune)

A file holds the runs of one GPU, {"format", "gpu", "runs": [{"date", "environment", "rows", …}]}; a row is one
measured thing and has a "version" and, for a version, the hash of its kernel's sources: a row whose kernel has changed
since is stale. A run of times has "ceilings", {"tflops": {dtype: TFLOP/s of a matrix product}, "copy_tb_s": TB/s of a
device copy, bytes read and written}, and "interrupted", true if it was ended early; older ones lack both.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import reprlib
import subprocess
from collections.abc import Callable, Collection, Hashable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flash_tutorial import files

RESULTS = Path(__file__).resolve().parent.parent / "results"
FORMAT = 1
FIELDS = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "dtype", "causal")  # of a Problem, in a row
_FOLDERS = {"times": ".", "profiles": "profiles", "counters": "counters", "tuning": "tuning"}


def environment() -> dict[str, str]:
    """What a figure depends on beside the kernel: GPU, clocks and power as found, driver, toolkit, libraries."""
    import torch

    return {
        "name": torch.cuda.get_device_name(),
        **_query("driver_version", "clocks.sm", "clocks.max.sm", "power.limit", "pstate"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "cudnn": str(torch.backends.cudnn.version()),
    }


def gpu_state() -> str:
    """The current GPU's clock, power, temperature and power state at this moment; "" where no nvidia-smi tells them."""
    return ", ".join(_query("clocks.sm", "power.draw", "temperature.gpu", "pstate").values())


def _query(*fields: str) -> dict[str, str]:
    """What nvidia-smi says of the GPU that this process uses, which need not be the machine's first."""
    import torch

    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", f"GPU-{uuid}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return {}
    values = [value.strip() for value in answer.stdout.split(",")] if answer.returncode == 0 else []
    return dict(zip(fields, values, strict=False))


def gpu_stem(name: str) -> str:
    """The results file's stem for a GPU: ``NVIDIA H200`` gives ``h200``."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower().removeprefix("nvidia ").removeprefix("geforce ")).strip("_")


def path_of(kind: str, gpu: str, folder: Path | None = None) -> Path:
    """The path of a GPU's results file of a kind ("times", "profiles", "counters", "tuning")."""
    return _folder(kind, folder) / f"{gpu_stem(gpu)}.json"


def check(kind: str, gpu: str, folder: Path | None = None) -> Path:
    """The path of a GPU's results file of a kind, after a look at whether a run can be added to it: to be asked before
    anything is measured.

    Raises ValueError if the file is damaged or of another format version, OSError if it cannot be written.
    """
    path = path_of(kind, gpu, folder)
    if path.exists():
        _read(kind, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"{path.parent} cannot be written to: results are kept there")
    return path


def append(
    kind: str,
    rows: list[dict[str, Any]],
    *,
    where: dict[str, str] | None = None,
    folder: Path | None = None,
    **more: Any,
) -> Path:
    """Adds one dated run to a GPU's results file of a kind, atomically, and returns the file's path.

    where  the run's environment; None: this machine's, now
    more   further facts of the run, such as the ceilings measured with it

    Raises what `check` does, leaving the file as it was.
    """
    where = environment() if where is None else where
    path = check(kind, where["name"], folder)
    with _alone_in(path.parent):
        document = _read(kind, path) if path.exists() else {"format": FORMAT, "gpu": where["name"], "runs": []}
        date = datetime.now(UTC).isoformat(timespec="seconds")
        document["runs"].append({"date": date, "environment": where, **more, "rows": rows})
        text = json.dumps(document, indent=1) + "\n"  # before a file is begun: this may fail
        files.write(path, text)
    return path


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One process at a time: of two that read a file, add to it and replace it at once, one would lose its run."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system that knows no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def runs(kind: str, folder: Path | None = None, gpu: str | None = None) -> list[dict[str, Any]]:
    """Every run of a kind, of all GPUs or of one, oldest first, each with its "gpu".

    Raises ValueError if a file is damaged or of another format version.
    """
    found = []
    stem = "*" if gpu is None else gpu_stem(gpu)
    for path in sorted(_folder(kind, folder).glob(f"{stem}.json")):
        document = _read(kind, path)
        found += [{**run, "gpu": document["gpu"]} for run in document["runs"]]
    return sorted(found, key=lambda run: run["date"])


def find_gpu(kind: str, name: str | None = None, folder: Path | None = None) -> str | None:
    """The GPU of stored runs of a kind that a name, or its file's ("h200"), means; without one, that of the newest run.

    None where nothing is stored and no name given. Raises ValueError for a name that no stored run has.
    """
    names = [run["gpu"] for run in runs(kind, folder)]
    if name is None:
        return names[-1] if names else None
    by_stem = {gpu_stem(known): known for known in names}
    if gpu_stem(name) not in by_stem:
        stems = ", ".join(sorted(by_stem)) or "none"
        raise ValueError(f"no {kind} of a GPU {name!r} in results: those with {kind} are {stems}")
    return by_stem[gpu_stem(name)]


def rows(kind: str, folder: Path | None = None, gpu: str | None = None) -> list[dict[str, Any]]:
    """Every row of a kind, of all GPUs or of one (see `find_gpu`), oldest first, each with the "gpu" and "date" of its
    run, "run": all that the run says of itself but its rows, the same object for these, and "stale": see `mark_stale`.
    """
    gpu = None if gpu is None else find_gpu(kind, gpu, folder)
    found = []
    for run in runs(kind, folder, gpu):
        facts = {name: value for name, value in run.items() if name != "rows"}
        found += [{**row, "gpu": run["gpu"], "date": run["date"], "run": facts} for row in run["rows"]]
    mark_stale(found)
    return found


def newest(
    kind: str, key: Callable[[dict[str, Any]], Hashable], folder: Path | None = None, gpu: str | None = None
) -> list[dict[str, Any]]:
    """Of `rows` the newest of every GPU, version and `key(row)`."""
    return list({(row["gpu"], row["version"], key(row)): row for row in rows(kind, folder, gpu)}.values())


def mark_stale(rows: Collection[dict[str, Any]]) -> None:
    """Gives each row a "stale": whether its kernel has changed since it was measured, or is gone."""
    names = {row["version"] for row in rows if "kernel_hash" in row}
    current = {name: kernel_hash(name) for name in names}
    for row in rows:
        row["stale"] = "kernel_hash" in row and row["kernel_hash"] != current[row["version"]]


def kernel_hash(name: str) -> str | None:
    """The hash of a version's, or variant's, sources as they are now; None if there is none of this name."""
    from flash_tutorial import build, registry

    try:
        return build.source_hash(registry.resolve(name))
    except (ValueError, build.BuildError):
        return None


def _folder(kind: str, folder: Path | None) -> Path:
    return (RESULTS if folder is None else folder) / _FOLDERS[kind]


def _read(kind: str, path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); mend or remove it") from error
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path} has results format {found!r}; this version reads format {FORMAT}")
    if trouble := _trouble(document, kind, path.stem):
        raise ValueError(f"{path} is damaged ({trouble}); mend or remove it")
    return document


# ---------------------------------------------------------------------------------------------- whole files


def _trouble(document: dict[str, Any], kind: str, stem: str) -> str | None:
    """What is wrong with a file's content, so that all who read rows can rely on them; None if nothing is."""
    gpu, found = document.get("gpu"), document.get("runs")
    if not isinstance(gpu, str) or not isinstance(found, list):
        return "it names no GPU, or has no list of runs"
    if gpu_stem(gpu) != stem:
        return f"it is of {gpu!r}, whose file is {gpu_stem(gpu)}.json"
    for run in found:
        if not isinstance(run, dict) or not isinstance(run.get("date"), str) or not isinstance(run.get("rows"), list):
            return "a run in it has no date, or no list of rows"
        for each, whole in ((run, _RUN), *((row, _ROW) for row in run["rows"])):
            if not isinstance(each, dict):
                return f"a row of the run of {run['date']} is {reprlib.repr(each)}"
            needed = _NEEDED[kind] if whole is _ROW else ()
            if lacking := [name for name in needed if name not in each]:
                return f"a row of the run of {run['date']} lacks {', '.join(lacking)}"
            for name, value in each.items():
                if name in whole and not whole[name](value):
                    return f"{name} in the run of {run['date']} is {reprlib.repr(value)}"
    return None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_figure(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 2**63


def _each(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is an object, all of whose values fit."""
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def _is_timing(value: Any) -> bool:
    return _each(_is_figure)(value) and set(value) == {"median", "p20", "p80"}


def _is_ceilings(value: Any) -> bool:
    return isinstance(value, dict) and all(
        (_each(_is_figure) if name == "tflops" else _is_figure)(each) for name, each in value.items()
    )


#: What these fields of a run and of a row are, where they are there.
_RUN = {"environment": _each(_is_text), "ceilings": _is_ceilings}
_ROW = {
    **dict.fromkeys(("version", "kernel_hash", "dtype", "tiles", "wrong", "refused"), _is_text),
    **dict.fromkeys(("batch", "heads", "kv_heads", "seq", "queries", "keys", "head_dim"), _is_count),
    **dict.fromkeys(("warmup", "repetitions"), _is_count),
    **dict.fromkeys(("emulator", "hardware", "counters"), _each(_is_whole)),
    **dict.fromkeys(("dram_read_bytes", "dram_write_bytes"), lambda value: value is None or _is_count(value)),
    "duration_us": lambda value: value is None or _is_figure(value),
    "causal": lambda value: isinstance(value, bool),
    "microseconds": _is_timing,
    "reasons": _each(_is_text),
    "own": lambda value: value is None or _is_text(value),
}
#: What every row of a kind has.
_SHAPE = ("version", "batch", "heads", "seq", "head_dim")
_NEEDED = {
    "times": _SHAPE,
    "profiles": ("version", *FIELDS),
    "counters": ("version", *FIELDS, "emulator", "hardware"),
    "tuning": (*_SHAPE, "kernel_hash", "tiles", "own"),
}
