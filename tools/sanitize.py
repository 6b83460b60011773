"""Runs kernels on a GPU under compute-sanitizer: `python tools/sanitize.py [VERSION ...]`, all if none is named.

memcheck looks for accesses outside of tensors and of shared memory, racecheck for races in shared memory, synccheck for
barriers that not all threads reach, initcheck for reads of global memory that nobody has written. Each version runs
with each of its dtypes and tile shapes on small problems. A variant and the path of a .cu file are taken, too.

Exit status: 0 if all is clean; 1, with what the tool says, if one finds something or cannot do its work, or a kernel
does not compile; 2 if asked wrongly, or on a machine without a GPU or compute-sanitizer.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tabulate import tabulate
from tqdm import tqdm

from flash_tutorial import build, registry
from flash_tutorial.versions import VERSIONS, Version

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
AT_ONCE = 8  # processes that share the GPU, if there are as many cores
FOUND = 9  # the exit status that a tool is told to end with if it finds something: none of Python's own

# Queries, keys, head size, causal: ragged, more of either, rows that see no key, whole tiles, no key at all.
PROBLEMS = (
    (130, 200, 64, False),
    (300, 300, 64, True),
    (200, 130, 128, True),
    (128, 256, 128, False),
    (65, 257, 32, True),
    (5, 0, 64, False),
)


def watch(version: Version) -> None:
    """What a tool watches. Tensors come from the CPU, in copies that initcheck knows of."""
    torch.manual_seed(0)
    operator = registry.operator(version, "cuda")
    for dtype in version.dtypes:
        for queries, keys, head_dim, causal in PROBLEMS:
            if head_dim not in version.head_dims:
                continue
            q = torch.randn(2, 4, queries, head_dim).to(getattr(torch, dtype)).cuda()
            k, v = (torch.randn(2, keys, 2, head_dim).to(getattr(torch, dtype)).cuda().transpose(1, 2) for _ in "kv")
            for tiles in range(len(version.tiles)) or (-1,):
                operator(q, k.contiguous(), v.contiguous(), causal, 0.1, tiles)
                if version.strided:
                    operator(q, k, v, causal, 0.1, tiles)
    torch.cuda.synchronize()


def report(sanitizer: str, tool: str, name: str) -> tuple[str, str]:
    """What a tool finds in a version, in a word or two, and all that it says if that is more than nothing."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, __file__, "--watched", name]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each tensor has bounds of its own
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode == FOUND:
        return "finds something", done.stdout
    if done.returncode or not re.search(r"SUMMARY: 0 (errors|hazards)", done.stdout):  # it may have seen no kernel
        return "fails", f"{done.stdout}(exit status {done.returncode})"
    return "clean", ""


def find_sanitizer() -> str | None:
    """compute-sanitizer on the PATH or beside nvcc; None where there is none."""
    nvcc = build.nvcc()
    places = (None, nvcc and str(Path(nvcc).parent), "/usr/local/cuda/bin")
    return next((found for place in places if (found := shutil.which("compute-sanitizer", path=place))), None)


def sanitize(names: list[str], sanitizer: str) -> bool:
    """Shows what every tool finds in every version, and returns whether all is clean. Raises BuildError."""
    for name in names:
        registry.operator(registry.resolve(name), "cuda")  # builds it, once
    jobs = [(tool, name) for name in names for tool in TOOLS]
    with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
        running = pool.map(lambda job: report(sanitizer, *job), jobs)
        said = dict(zip(jobs, tqdm(running, total=len(jobs), leave=False, disable=None), strict=True))
    for (tool, name), (_, text) in said.items():
        if text:
            print(f"{tool} {name}\n{text}\n")
    print(tabulate([[name, *(said[tool, name][0] for tool in TOOLS)] for name in names], ["version", *TOOLS]))
    return all(word == "clean" for word, _ in said.values())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION|PATH.cu", help="whose kernels; none: all versions")
    parser.add_argument("--watched", help=argparse.SUPPRESS)  # the version that a tool watches this process run
    options = parser.parse_args(arguments)
    if options.watched:
        watch(registry.resolve(options.watched))
        return 0

    try:
        versions = {name: registry.resolve(name) for name in options.versions or [each.name for each in VERSIONS]}
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        parser.error(
            f"compute-sanitizer needs a CUDA GPU, and torch {torch.__version__} sees none: `flash-tutorial run` checks "
            "a kernel in the emulator"
        )
    gpu = torch.cuda.get_device_capability()
    for version in versions.values():
        if gpu < build.capability(version.min_arch):
            parser.error(
                f"{version.label} needs a GPU of compute capability {version.min_arch} or later; "
                f"{torch.cuda.get_device_name()} has {gpu[0]}.{gpu[1]}"
            )
    sanitizer = find_sanitizer()
    if sanitizer is None:
        parser.error(
            "there is no compute-sanitizer: it is not on the PATH, beside nvcc, or in /usr/local/cuda/bin. The CUDA "
            "toolkit brings it"
        )
    try:
        return 0 if sanitize(list(versions), sanitizer) else 1
    except build.BuildError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
