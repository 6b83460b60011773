"""From a kernel's source to a library that PyTorch can load: one path for setup.py and for a kernel edited just now.

A kernel file is compiled by itself, without PyTorch's headers, in a second or two; `kernels/binding.cpp`, which needs
them, is compiled once for each kind of device and linked to every kernel. There are three backends:

    cuda           nvcc: for a GPU
    emulated       g++, against kernels/emulator: exact and quick, finds deadlocks and crashes
    instrumented   the same with a hook at every memory access: counts, and finds races too

Everything built is named by a hash of what it was built from, so that a library found under its name is never stale,
and a kernel edited in a running process gets a new operator. Nothing in this file imports torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import glob
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from flash_tutorial import files
from flash_tutorial.versions import KERNELS, Version

#: Where setup.py puts libraries; what is built on demand goes to cache_dir().
LIBRARIES = Path(__file__).resolve().parent / "_lib"
EMULATOR = KERNELS / "emulator"
BINDING = KERNELS / "binding.cpp"
BACKENDS = ("cuda", "emulated", "instrumented")
DEFAULT_ARCHS = ("8.0", "8.6", "8.9", "9.0+PTX")

_INCLUDES = ("-I", str(KERNELS / "include"), "-I", str(KERNELS))
_CXX = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fdiagnostics-color=never")
# A float product and sum become one fused operation, as nvcc does it. Thread-local variables, the emulator's shared
# memory, are reached without initialisation functions; each library keeps its own inline variables. Like nvcc's, the
# memory of a kernel has no types: it may read a register array of words as halves. A large local array touches all its
# pages, and so cannot reach over the guard page into the stack of another thread. In DWARF 5's line tables addr2line
# (binutils 2.40) takes the first file of a unit for another. -g1 has all that reports ask for, lines and inlined
# functions; variables would take a quarter more time.
_EMULATED = (
    *_CXX, "-O2", "-gdwarf-4", "-g1", "-ffp-contract=fast", "-fno-strict-aliasing", "-fno-gnu-unique",
    "-fno-extern-tls-init", "-fstack-clash-protection", "-fmax-errors=5",
)  # fmt: skip
# GCC's race detector as a source of hooks: the emulator supplies them, the detector's own library is not linked.
_INSTRUMENTED = ("-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0")
_NVCC = ("-std=c++17", "-O3", "-lineinfo", "-Xcompiler=-fPIC,-fvisibility=hidden")
_BINDING = (*_CXX, "-O2", "-DTORCH_TARGET_VERSION=0x020b000000000000")  # PyTorch 2.11 and later


class BuildError(RuntimeError):
    """A kernel could not be built: the compiler's message, or what is missing and how to get it."""


# ---------------------------------------------------------------------------------------------------------- the tools


def cxx() -> str:
    """The C++ compiler: $CXX if it is called like a GCC, else g++. Raises BuildError if there is none."""
    chosen = os.environ.get("CXX", "g++")
    if not re.search(r"(^|-)[cg]\+\+(-[\d.]+)?$", Path(chosen).name):
        chosen = "g++"  # the emulator's hooks are GCC's
    found = shutil.which(chosen)
    if found is None:
        raise BuildError(f"no C++ compiler: {chosen} is not on the PATH; install it (Debian, Ubuntu: apt install g++)")
    return found


def nvcc() -> str | None:
    """nvcc from $CUDA_HOME, $CUDA_PATH, the PATH, /usr/local/cuda or its PyPI package; None where there is none."""
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home and (found := shutil.which("nvcc", path=str(Path(home) / "bin"))):
            return found
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin") or packaged("nvidia-cuda-nvcc")


def packaged(package: str) -> str | None:
    """The program that a package of NVIDIA's on PyPI, such as nvidia-cuda-nvcc, brings; None if it is not installed."""
    try:
        files = importlib.metadata.distribution(package).files or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    program = package.rpartition("-")[2]
    return next(
        (str(file.locate()) for file in files if file.name == program and os.access(file.locate(), os.X_OK)), None
    )


def nvcc_trouble() -> str | None:
    """Why nvcc cannot build anything here, an empty file included (its host compiler is too new, it does not know an
    architecture, …); None if it can."""
    with tempfile.TemporaryDirectory() as temporary:
        empty = Path(temporary) / "empty.cu"
        empty.touch()
        try:
            _compile(empty, "cuda", architectures(), "empty", empty.with_suffix(".o"))
        except BuildError as error:
            return str(error)
    return None


def torch_include() -> Path:
    """The directory of PyTorch's headers. Raises BuildError if PyTorch is not installed."""
    spec = importlib.util.find_spec("torch")  # finds the package without importing it
    if spec is None or spec.origin is None:
        raise BuildError("PyTorch is not installed here: pip install 'torch>=2.11'")
    return Path(spec.origin).parent / "include"


@functools.cache
def _cpu_flags() -> tuple[str, ...]:
    """What this machine's CPU allows. It is part of a library's name, so a cache may be shared between machines."""
    if platform.machine() != "x86_64":
        return ()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as cpuinfo:
            flags = next((line for line in cpuinfo if line.startswith("flags")), "").split()
    except OSError:
        return ()
    return ("-march=x86-64-v3",) if {"avx2", "bmi2", "fma", "f16c", "movbe"} <= set(flags) else ()


# ------------------------------------------------------------------------------------------------- GPU architectures

_NAMED_ARCHS = {"ampere": ("8.0", "8.6"), "ada": ("8.9",), "hopper": ("9.0",), "blackwell": ("10.0", "12.0")}


def architectures(text: str | None = None) -> tuple[str, ...]:
    """The compute capabilities that a list such as "8.0;9.0", "9.0+PTX", "8.0 9.0a" or "Ampere;Hopper" names.

    Without a list: $TORCH_CUDA_ARCH_LIST, else DEFAULT_ARCHS. Raises ValueError on a word that is no architecture.
    """
    if text is None:
        text = os.environ.get("TORCH_CUDA_ARCH_LIST") or ";".join(DEFAULT_ARCHS)
    archs = []
    for word in re.split(r"[;,\s]+", text.strip()):
        base, plus, ptx = word.partition("+")
        named = _NAMED_ARCHS.get(base.lower(), (base,))
        if not all(re.fullmatch(r"\d+\.\d[af]?", arch) for arch in named) or (plus and ptx.upper() != "PTX"):
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST: {word!r} is no architecture; accepted are compute capabilities such as 8.0, "
                f"9.0a or 9.0+PTX, and {', '.join(name.capitalize() for name in _NAMED_ARCHS)}, separated by ;"
            )
        archs += [*named[:-1], named[-1] + ("+PTX" if plus else "")]
    return tuple(dict.fromkeys(archs))


def capability(arch: str) -> tuple[int, int]:
    """(9, 0) for "9.0", "9.0a" or "9.0+PTX"."""
    major, minor = re.match(r"(\d+)\.(\d)", arch).groups()
    return int(major), int(minor)


def version_archs(version: Version, requested: Iterable[str]) -> tuple[str, ...]:
    """What to build a version for: its own `archs`, else those of the requested ones that its `min_arch` allows."""
    if version.archs is not None:
        return version.archs
    return tuple(arch for arch in requested if capability(arch) >= capability(version.min_arch))


def _gencode(arch: str) -> list[str]:
    """nvcc's flags for one architecture: machine code, and PTX for later GPUs where asked for."""
    number = arch.removesuffix("+PTX").replace(".", "")
    code = f"[sm_{number},compute_{number}]" if arch.endswith("+PTX") else f"sm_{number}"
    return ["-gencode", f"arch=compute_{number},code={code}"]


def _runs_on(arch: str, gpu: tuple[int, int]) -> bool:
    """Whether code for `arch` runs on a GPU: machine code within a major number, "9.0a" only there, PTX upwards."""
    if arch.endswith("+PTX"):
        return capability(arch) <= gpu
    if arch.endswith("a"):
        return capability(arch) == gpu
    return capability(arch)[0] == gpu[0] and capability(arch)[1] <= gpu[1]


# ------------------------------------------------------------------------------------------------- names and contents

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)


def dependencies(source: Path, backend: str) -> tuple[Path, ...]:
    """The source and every file of ours, or of the reader's, that it includes; the emulator's only where it is used.

    Raises BuildError if the source does not exist.
    """
    source = Path(source).resolve()
    if not source.is_file():
        raise BuildError(f"there is no file {source}")
    found: dict[Path, None] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path in found or (backend == "cuda" and EMULATOR in path.parents):
            continue
        found[path] = None
        for name in _INCLUDE.findall(path.read_bytes()):
            for directory in (path.parent, KERNELS / "include", KERNELS):
                if (candidate := directory / os.fsdecode(name)).is_file():
                    waiting.append(Path(os.path.normpath(candidate)))
                    break
    return tuple(found)


def source_hash(version: Version) -> str:
    """Ten hexadecimal digits that change when a version's kernel, or a header of ours that it includes, changes."""
    return _hash(dependencies(version.source, "cuda"))


def _hash(paths: Iterable[Path], *flags: str) -> str:
    digest = hashlib.sha256("\0".join(flags).encode())
    for path in paths:
        digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:10]


def cache_dir() -> Path:
    """Where libraries built on demand are kept: $FLASH_TUTORIAL_CACHE, else flash-tutorial in the user's cache."""
    if configured := os.environ.get("FLASH_TUTORIAL_CACHE"):
        return Path(configured).expanduser().resolve()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = home / "flash-tutorial"
    nearest = next((each for each in (place, home) if os.path.exists(each)), home.parent)
    if os.access(nearest, os.W_OK):
        return place
    return Path(tempfile.gettempdir()) / f"flash-tutorial-{os.getuid()}"


def operator_name(library: Path) -> str:
    """The operator that a library implements: its file name, made an identifier."""
    name = re.sub(r"\W", "_", library.stem, flags=re.ASCII)
    return f"_{name}" if name[0].isdigit() else name


# --------------------------------------------------------------------------------------------------------- the builds


def library(
    version: Version,
    backend: str,
    archs: Iterable[str] | None = None,
    directory: Path | None = None,
    force: bool = False,
) -> Path:
    """The library of a version for a backend, built if it is not there yet.

    archs      compute capabilities for the "cuda" backend; default: architectures()
    directory  where to put it; default: the cache, after a look where setup.py puts its libraries
    force      build it even if it is there

    Raises BuildError with the compiler's message, or with what is missing on this machine.
    """
    source = version.source.resolve()
    archs = version_archs(version, architectures() if archs is None else archs) if backend == "cuda" else ()
    words = [source.stem, _library_hash(source, backend), backend, *(arch.replace("+", "") for arch in archs)]
    build = functools.partial(_build_library, source, backend, archs)
    return _product("-".join(words) + ".so", directory, force, build)


def find_library(version: Version, backend: str, gpu: tuple[int, int] | None = None) -> Path | None:
    """The library of a version for a backend, if it is built already; for "cuda", one that runs on `gpu`, a compute
    capability such as (9, 0), or with None on any. None too where the sources are not there."""
    source = version.source.resolve()
    if not source.is_file():
        return None
    prefix = f"{source.stem}-{_library_hash(source, backend)}-{backend}"
    for directory in (LIBRARIES, cache_dir()):
        for path in sorted(directory.glob(f"{glob.escape(prefix)}*.so")):
            archs = [word.replace("PTX", "+PTX") for word in path.stem.removeprefix(prefix).split("-")[1:]]
            if backend != "cuda" or gpu is None or any(_runs_on(arch, gpu) for arch in archs):
                return path
    return None


def runtime(directory: Path | None = None, force: bool = False) -> Path:
    """The emulator itself, libflash_emulator, which every emulated library calls; built if it is not there yet."""
    flags = (*_EMULATED, *_cpu_flags())
    name = f"libflash_emulator-{_hash(sorted(EMULATOR.glob('*.[ch]*')), *flags)}.so"

    def build(target: Path, temporary: Path) -> None:
        objects = []
        for source in sorted(EMULATOR.glob("*.cpp")):
            objects.append(str(temporary / f"{source.stem}.o"))
            _run([cxx(), *flags, *_INCLUDES, "-c", str(source), "-o", objects[-1]], source)
        _run([cxx(), "-shared", *objects, "-o", str(target), "-lpthread", "-ldl"], target)

    return _product(name, directory, force, build)


def emulated_module(source: Path, wrapper: str, instrumented: bool = True) -> Path:
    """A library of a small kernel file for the emulator, without a PyTorch operator; built if it is not in the cache.

    What is compiled is `wrapper`, text that includes `source` and the emulator's export.h. Raises BuildError with the
    compiler's message.
    """
    source = Path(source).resolve()
    backend = "instrumented" if instrumented else "emulated"
    parts = (wrapper, _library_hash(source, backend), _library_hash(EMULATOR / "export.h", backend))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]

    def build(target: Path, temporary: Path) -> None:
        unit, kernel = temporary / "module.cu", temporary / "module.o"
        unit.write_text(wrapper, encoding="utf-8")
        _compile(unit, backend, (), "module", kernel, shown=source)
        _run([cxx(), "-shared", str(kernel), "-o", str(target), "-Wl,-Bsymbolic"], source)

    return _product(f"{source.stem}-{digest}-module-{backend}.so", None, False, build)


def scratch_source(text: str) -> Path:
    """A file that holds `text`, a small kernel, kept in the cache for the reports that quote from it."""
    path = cache_dir() / "sources" / f"kernel_{hashlib.sha256(text.encode()).hexdigest()[:10]}.cu"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, text)
    return path


def binding(backend: str, directory: Path | None = None, force: bool = False) -> Path:
    """The object file that makes an operator of a kernel, for CUDA or CPU tensors; built if it is not there yet."""
    device = "cuda" if backend == "cuda" else "cpu"
    flags = (*_BINDING, *(["-DUSE_CUDA"] if device == "cuda" else []))
    name = f"binding-{_hash(dependencies(BINDING, backend), *flags)}-{device}.o"

    def build(target: Path, temporary: Path) -> None:
        include = ("-I", str(KERNELS / "include"), "-isystem", str(torch_include()))
        _run([cxx(), *flags, *include, "-c", str(BINDING), "-o", str(target)], BINDING)

    return _product(name, directory, force, build)


def _library_hash(source: Path, backend: str) -> str:
    """A hash of all that decides what a kernel's library does, but for the architectures."""
    flags = {
        "cuda": _NVCC,
        "emulated": (*_EMULATED, *_cpu_flags()),
        "instrumented": (*_EMULATED, *_cpu_flags(), *_INSTRUMENTED),
    }
    if backend not in flags:
        raise ValueError(f"unknown backend {backend!r}: accepted are {', '.join(BACKENDS)}")
    files = dependencies(source, backend)
    # The paths count too: a library's line table, which reports and profilers quote from, holds them.
    return _hash([*files, BINDING], *flags[backend], *_BINDING, *map(str, files))


def _build_library(source: Path, backend: str, archs: tuple[str, ...], target: Path, temporary: Path) -> None:
    if backend == "cuda" and not archs:
        raise BuildError(f"{source.stem} runs on none of the requested architectures")
    kernel = temporary / "kernel.o"
    _compile(source, backend, archs, operator_name(target), kernel)
    objects = [str(kernel), str(binding(backend, temporary.parent))]
    # The linker is only told the names of PyTorch's libraries, through empty ones: at run time they are in the process
    # already. So a CUDA library can be linked where PyTorch has no CUDA.
    torch = ("libtorch_cpu.so", "libtorch_cuda.so") if backend == "cuda" else ("libtorch_cpu.so",)
    linker = ["-Bsymbolic", "--no-as-needed", *(str(_empty_library(name, temporary)) for name in torch)]
    tool = [*_nvcc_command(), "-cudart=static"] if backend == "cuda" else [cxx()]
    _run(
        [*tool, "-shared", *objects, *(word for flag in linker for word in ("-Xlinker", flag)), "-o", str(target)],
        source,
    )


def _empty_library(name: str, directory: Path) -> Path:
    path = directory / name
    _run([cxx(), "-shared", f"-Wl,-soname,{name}", "-x", "c", os.devnull, "-o", str(path)], path)
    return path


def _compile(
    source: Path, backend: str, archs: tuple[str, ...], operator: str, target: Path, shown: Path | None = None
) -> None:
    """One kernel file to one object file. An error is said to be `shown`'s, if that is not the source."""
    operator_flag = f'-DFLASH_OP_NAME="{operator}"'
    if backend == "cuda":
        # All cores work on one file: on its architectures, and on its kernels, of which some files have dozens.
        parallel = ("--threads", str(len(archs)), "--split-compile", "0")
        gencode = [*parallel, *(flag for arch in archs for flag in _gencode(arch))]
        flags = (*_NVCC, *gencode, operator_flag, *_INCLUDES)
        command = [*_nvcc_command(), *flags, "-c", str(source), "-o", str(target)]
    else:
        hooks = _INSTRUMENTED if backend == "instrumented" else ()
        flags = (*_EMULATED, *_cpu_flags(), *hooks, operator_flag, *_INCLUDES)
        command = [cxx(), *flags, "-x", "c++", "-c", str(source), "-o", str(target)]
    _run(command, shown or source)


def _nvcc_command() -> list[str]:
    """nvcc, with the host compiler that $CXX chooses."""
    if (found := nvcc()) is None:
        raise BuildError(
            "there is no nvcc, which builds kernels for a GPU: install NVIDIA's CUDA toolkit and put nvcc on the PATH, "
            "or set CUDA_HOME; or `pip install nvidia-cuda-nvcc nvidia-cuda-runtime`"
        )
    return [found, "-ccbin", cxx()] if os.environ.get("CXX") else [found]


def _run(command: list[str], source: Path) -> None:
    """Runs a compiler. Raises BuildError with its message, which quotes the reader's lines."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "LC_ALL": "C"},
    )
    if done.returncode != 0:
        raise BuildError(f"{source} does not compile ({Path(command[0]).name}):\n{done.stdout.strip()}")


def _product(name: str, directory: Path | None, force: bool, build) -> Path:
    """The file `name`, built by build(target, temporary directory) if no directory has it.

    It is moved into place when it is complete, so that a reader sees all of it or nothing, and built by one thread or
    process while others wait.
    """
    for place in (directory,) if directory else (LIBRARIES, cache_dir()):
        if not force and (place / name).exists():
            return place / name
    directory = directory or cache_dir()
    target = directory / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _exclusively(name):
            if force or not target.exists():
                with tempfile.TemporaryDirectory(prefix=".build-", dir=directory) as temporary:
                    unfinished = Path(temporary) / name
                    build(unfinished, Path(temporary))
                    unfinished.replace(target)
    except OSError as error:
        raise BuildError(
            f"{error}: {name} cannot be built in {directory}; $FLASH_TUTORIAL_CACHE may name another directory"
        ) from error
    return target


@contextlib.contextmanager
def _exclusively(name: str) -> Iterator[None]:
    locks = cache_dir() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / name, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
