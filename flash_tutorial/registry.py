"""From a name, or the path of a reader's own kernel, to an operator that PyTorch can call.

The operators here are the raw ones: one for each kernel, backend and content, with inputs as the kernel wants them.
`flash_tutorial.ops` puts the contract around them.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from flash_tutorial import build
from flash_tutorial.variants import variant
from flash_tutorial.versions import Version, find

NAMESPACE = "flash_tutorial_kernels"
SCHEMA = "(Tensor q, Tensor k, Tensor v, bool causal, float scale, int tiles=-1) -> (Tensor, Tensor, int)"


def resolve(version: str | int | os.PathLike | Version, like: str | int | None = None) -> Version:
    """The version that a name, or the path of a reader's own `.cu` file, means.

    A file gets the dtypes, head sizes and parent of the version called `like`, else of the one that its name tells
    ("my_v03.cu", "v03_warp_local.cu"); its `name` is the file's, without the ending. Either may be followed by
    settings, "v04:pad=0" or "my_v04.cu:pad=0", for a variant.
    Raises ValueError for an unknown name (with the near matches), a file that does not exist, a file that nothing
    says the version of, and unknown settings; TypeError for anything that is neither a name nor a path.
    """
    if isinstance(version, Version):
        return version
    if isinstance(version, bool) or not isinstance(version, (str, int, os.PathLike)):
        raise TypeError(f"version must be a name such as 'v03' or the path of a .cu file, not {version!r}")
    if not isinstance(version, int):
        name, colon, settings = os.fspath(version).rpartition(":")
        if colon and not _is_path(settings):  # else it is the path's own colon
            return variant(resolve(name, like), settings)
    if isinstance(version, int) or not _is_path(os.fspath(version)):
        return find(version)

    path = Path(version).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"version: there is no kernel file {os.fspath(version)!r}")
    told = re.search(r"(?<![a-zA-Z0-9])v\d+(?![0-9])", path.stem)
    if like is None and told is None:
        raise ValueError(
            f"version: the name of {path.name} does not say which version it is like; name it as in my_v03.cu, or say "
            "like='v03' (--like v03): its dtypes, head sizes and parent are taken from there"
        )
    return replace(find(told.group() if like is None else like), name=path.stem, own=path)


def short(name: str) -> str:
    """A version's or variant's name as a reader types it: v04_vectorized:pad=0 is v04:pad=0; others as they are."""
    return re.sub(r"^(v\d+)_\w+(?=:|$)", r"\1", name)


def _is_path(text: str) -> bool:
    return text.endswith(".cu") or os.sep in text


# ------------------------------------------------------------------------------------------------------ raw operators


@dataclass
class _Loaded:
    operator: Callable
    files: tuple[str, ...]  # what it was built from
    stamps: tuple[tuple[int, int], ...]  # of the files, as they were then


_loaded: dict[tuple[Path, str], _Loaded] = {}
_operators: dict[str, Callable] = {}  # by operator name: every library that this process has loaded
_lock = threading.RLock()


def operator(version: Version, backend: str) -> Callable:
    """The raw operator of a version on a backend ("cuda", "emulated" or "instrumented"), built and loaded if need be.

    An edit of the kernel, or of a header that it includes, is noticed at the next call. The operator wants
    16-byte-aligned tensors, contiguous ones if the version is not strided, and a compiled head size:
    op(q, k, v, causal, scale, tiles=-1) -> (out, lse, tiles), where `tiles` is the number of a tile shape: the one to
    take, -1 for the kernel's own choice, and the one taken, -1 by a kernel that has but one.

    Raises BuildError if the kernel does not compile, or what it takes to build or load it is missing.
    """
    key = (version.source, backend)
    loaded = _loaded.get(key)
    if loaded is None or tuple(map(_stamp, loaded.files)) != loaded.stamps:
        with _lock:
            # Stamps first: an edit during the build makes them out of date, and the next call looks again.
            files = tuple(map(str, build.dependencies(version.source, backend)))
            stamps = tuple(map(_stamp, files))
            loaded = _loaded[key] = _Loaded(_load(_library(version, backend), backend), files, stamps)
    return loaded.operator


def _stamp(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _library(version: Version, backend: str) -> Path:
    if backend != "cuda":
        return build.library(version, backend)
    import torch

    gpus = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    gpus = sorted(gpu for gpu in gpus if gpu >= build.capability(version.min_arch))
    found = {build.find_library(version, backend, gpu) for gpu in gpus}
    if len(found) == 1 and None not in found:
        return found.pop()
    return build.library(version, backend, [f"{major}.{minor}" for major, minor in gpus])


def _load(library: Path, backend: str) -> Callable:
    """Loads a library, and defines its operator's schema here: a library holds only the implementation, because two
    libraries that define one schema end the process."""
    import torch

    name = build.operator_name(library)
    if name not in _operators:
        release = tuple(map(int, re.match(r"(\d+)\.(\d+)", torch.__version__).groups()))
        if release < (2, 11):
            raise build.BuildError(f"PyTorch 2.11 or later is needed, this is {torch.__version__}")
        if backend == "cuda" and torch.version.cuda is None:
            # The library takes its stream from PyTorch's CUDA library, which only a CUDA build of PyTorch has.
            raise build.BuildError(f"PyTorch {torch.__version__} is built without CUDA and cannot load a CUDA kernel")
        if backend != "cuda":
            from flash_tutorial import emulator

            emulator.runtime()  # the library finds the emulator's functions in the process
        try:
            torch.ops.load_library(str(library))
        except OSError as error:
            raise build.BuildError(
                f"{error.__cause__ or error}: a kernel file has to define all that it calls, and to end in "
                "FLASH_REGISTER(launch)"
            ) from error
        _schemas().define(name + SCHEMA)
        _operators[name] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return _operators[name]


@functools.cache
def _schemas():
    import torch

    return torch.library.Library(NAMESPACE, "FRAGMENT")
