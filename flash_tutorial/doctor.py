"""What this machine can do with the kernels, what it lacks, and the command that mends it.

A check's state is "ok", "absent" (the emulator, and so every version and notebook, works without it) or "missing".
Nothing here needs PyTorch to be importable: that it is not is one of the things to find out.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flash_tutorial import build
from flash_tutorial.versions import VERSIONS, Version

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
NEEDED = ("numpy", "safetensors", "tabulate", "tqdm")
FOR_NOTEBOOKS = ("jupyterlab", "matplotlib", "nbclient")

# package manager → how it installs, and what it calls a package that is not called the same everywhere
MANAGERS = {
    "apt-get": ("sudo apt-get install -y", {}),
    "dnf": ("sudo dnf install -y", {"g++": "gcc-c++"}),
    "zypper": ("sudo zypper install -y", {"g++": "gcc-c++"}),
    "pacman": ("sudo pacman -S", {"g++": "gcc"}),
    "brew": ("brew install", {"g++": "gcc"}),
}


@dataclass(frozen=True)
class Check:
    name: str
    state: str
    detail: str
    mend: str | None = None  # a command, or where to get it


def examine(say: Callable[[str], None] = lambda text: None) -> list[Check]:
    """Every check, in the order in which one thing needs the other. `say` is told what takes long, before it starts."""
    torch_check, torch = _torch()
    packages = _packages("packages", NEEDED, "missing", "everything needs them")
    compiler = _compiler()
    checks = [_python(), torch_check, packages, compiler, _addr2line()]
    checks.append(_packages("notebooks", FOR_NOTEBOOKS, "absent", "the notebooks need them"))
    checks += [_nvcc(), *_gpu(torch)]
    checks += [_builds(version) for version in VERSIONS]
    if works(checks):
        say(f"Trying {VERSIONS[0].name} in the emulator; what is not built is compiled first")
        checks.append(_trial(VERSIONS[0]))
    return checks


def works(checks: list[Check]) -> bool:
    """Whether the emulator works here."""
    return all(check.state != "missing" for check in checks)


# ---------------------------------------------------------------------------------------------- the checks


def _install(package: str) -> str:
    """The command that installs a system package here."""
    for manager, (command, other_names) in MANAGERS.items():
        if shutil.which(manager):
            return f"{command} {other_names.get(package, package)}"
    return f"install {package} with this system's package manager"


def _pip(*packages: str) -> str:
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


def _first_line(*command: str) -> str | None:
    """What a tool says first; None if it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else None


def _python() -> Check:
    where = "a virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    detail = f"{platform.python_version()}, {sys.executable}, {where}, {platform.system()} {platform.machine()}"
    if sys.version_info < OLDEST_PYTHON:
        needed = ".".join(map(str, OLDEST_PYTHON))
        return Check("Python", "missing", f"{detail}: {needed} or later is needed", _install(f"python{needed}"))
    return Check("Python", "ok", detail)


def _torch() -> tuple[Check, object | None]:
    """The check, and the module if it could be imported."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    mend = _pip(f"torch>={oldest}")
    if importlib.util.find_spec("torch") is None:
        return Check("PyTorch", "missing", "not installed", mend), None
    try:
        import torch
    except Exception as error:  # a broken installation fails in its own way
        return Check("PyTorch", "missing", f"installed, but its import fails: {error}", mend), None
    version = torch.__version__
    detail = f"{version}, {f'with CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'}"
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_TORCH:
        return Check("PyTorch", "missing", f"{detail}: {oldest} or later is needed", mend), torch
    return Check("PyTorch", "ok", detail), torch


def _packages(name: str, wanted: tuple[str, ...], state: str, why: str) -> Check:
    lacking = [package for package in wanted if importlib.util.find_spec(package) is None]
    if lacking:
        return Check(name, state, f"without {', '.join(lacking)}: {why}", _pip(*lacking))
    return Check(name, "ok", ", ".join(wanted))


def _compiler() -> Check:
    try:
        compiler = build.cxx()
    except build.BuildError:
        return Check("g++", "missing", "not found: it compiles the kernels for the emulator", _install("g++"))
    said = _first_line(compiler, "--version")
    if said is None or "clang" in said:
        detail = f"{compiler} is {said or 'not a compiler that runs'}: the emulator needs GCC"
        return Check("g++", "missing", detail, _install("g++"))
    return Check("g++", "ok", f"{said}, {compiler}")


def _addr2line() -> Check:
    said = _first_line("addr2line", "--version")
    if said is None:
        detail = "not found: counters and findings name addresses instead of source lines"
        return Check("addr2line", "absent", detail, _install("binutils"))
    return Check("addr2line", "ok", f"{said}, {shutil.which('addr2line')}")


def _nvcc() -> Check:
    compiler = build.nvcc()
    if compiler is None:
        detail = "not found: kernels cannot be built for a GPU"
        return Check("nvcc", "absent", detail, "install the CUDA toolkit: https://developer.nvidia.com/cuda-downloads")
    try:
        text = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("nvcc", "absent", f"{compiler} does not run: {error}")
    release = re.search(r"release (\S+?),", text)
    return Check("nvcc", "ok", f"CUDA {release[1] if release else 'of unknown version'}, {compiler}")


def _gpu(torch) -> list[Check]:
    said = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if said is None:
        return [Check("GPU", "absent", "no NVIDIA driver here: tensors on the CPU run in the emulator")]
    driver = Check("driver", "ok", f"NVIDIA {said}")
    if torch is None or torch.version.cuda is None:
        detail = "this PyTorch is built without CUDA, so it cannot use it"
        mend = "pick a CUDA build of PyTorch: https://pytorch.org/get-started/locally"
        return [driver, Check("GPU", "absent", detail, mend)]
    if not torch.cuda.is_available():
        detail = f"PyTorch's CUDA {torch.version.cuda} cannot use it, mostly because the driver is older"
        return [driver, Check("GPU", "absent", detail, "update the NVIDIA driver: https://www.nvidia.com/drivers")]
    checks = [driver]
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        too_new = [version.name for version in VERSIONS if build.capability(version.min_arch) > (major, minor)]
        note = f"; too old for {', '.join(too_new)}" if too_new else ""
        checks.append(Check("GPU", "ok", f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}{note}"))
    return checks


def _builds(version: Version) -> Check:
    """Which of a version's three libraries are there, built from the sources as they are now."""
    if not version.source.is_file():
        return Check(version.name, "missing", f"{version.source} is not there", "git checkout -- kernels")
    found = {backend: _freshness(version, backend) for backend in build.BACKENDS}
    detail = "; ".join(
        f"{state}: {', '.join(backend for backend in found if found[backend] == state)}"
        for state in ("built", "out of date", "not built")
        if state in found.values()
    )
    wanted = [backend for backend in build.BACKENDS if backend != "cuda" or build.nvcc()]
    if all(found[backend] == "built" for backend in wanted):
        return Check(version.name, "ok", detail)
    in_place = ROOT / "setup.py"
    mend = f"cd {shlex.quote(str(ROOT))} && {shlex.join([sys.executable, 'setup.py', 'build_ext', '--inplace'])}"
    return Check(version.name, "absent", f"{detail} (first use builds it)", mend if in_place.is_file() else None)


def _freshness(version: Version, backend: str) -> str:
    if build.find_library(version, backend) is not None:
        return "built"
    places = (build.LIBRARIES, build.cache_dir())
    older = any(next(place.glob(f"{version.name}-*-{backend}*.so"), None) for place in places)
    return "out of date" if older else "not built"


def _trial(version: Version) -> Check:
    """The whole way once: compile if need be, load, emulate, compare with float64."""
    start = time.perf_counter()
    try:
        from flash_tutorial.compare import Problem, compare

        row = compare(version.name, Problem(queries=5, keys=7, head_dim=32), progress=False)[0]
    except Exception as error:  # any failure is the answer to the question
        return Check("trial", "missing", f"{type(error).__name__}: {error}")
    if row.status != "right":
        return Check("trial", "missing", f"{version.name} in the emulator: {row.status}. {row.note}")
    seconds = time.perf_counter() - start
    return Check("trial", "ok", f"{version.name} in the emulator: error {row.error:.1e}, {seconds:.1f} s with loading")


# ---------------------------------------------------------------------------------------------- what is shown


def describe(checks: list[Check], width: int = 100) -> str:
    """The checks as text; what is to be done stands under each."""
    indent = max(len(check.name) for check in checks) + 10
    lines = []
    for check, following in zip(checks, [*checks[1:], None], strict=True):
        head = f"{check.state:<8}{check.name:<{indent - 8}}"
        lines += textwrap.wrap(check.detail, width, initial_indent=head, subsequent_indent=" " * indent)
        if check.mend and not (
            following and following.mend == check.mend
        ):  # one command that mends several is said once
            lines.append(f"{' ' * indent}-> {check.mend}")
    missing = [check.name for check in checks if check.state == "missing"]
    verdict = (
        f"Missing: {', '.join(missing)}." if missing else "The emulator works: every version runs on this machine."
    )
    return "\n".join([*lines, "", verdict])


def to_json(checks: list[Check]) -> str:
    return json.dumps({"works": works(checks), "checks": [dataclasses.asdict(check) for check in checks]}, indent=2)
