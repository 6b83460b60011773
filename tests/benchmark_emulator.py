"""How long the emulator takes over each version, plain and instrumented, beside the bounds it promises.

    python -m tests.benchmark_emulator

B=1, H=2, M=N=512, D=64, the best of a few runs. Exit status 1 if a version is slower than the bounds, which are for two
cores: 0.1 s plain (a result can be checked at once) and 1 s instrumented (a table of counters, or of races).
"""

import os
import sys
import time

import torch
from tabulate import tabulate

import flash_tutorial
from flash_tutorial import emulator

SHAPE = (1, 2, 512, 64)
BOUNDS = {"plain": 0.1, "instrumented": 1.0}  # seconds
CORES = 2
RUNS = 5


def best_time(version: str, inputs: list[torch.Tensor]) -> float:
    """The shortest of RUNS calls, in seconds; one before them builds and loads the library."""
    times = []
    for _ in range(1 + RUNS):
        start = time.perf_counter()
        flash_tutorial.attention(*inputs, version=version)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main() -> int:
    emulator.configure(threads=min(CORES, os.cpu_count()))
    rows, slow = [], False
    for version in flash_tutorial.versions():
        torch.manual_seed(0)
        inputs = [torch.randn(SHAPE, dtype=getattr(torch, version.dtypes[0])) for _ in range(3)]
        plain = best_time(version.name, inputs)
        with emulator.instrument():
            instrumented = best_time(version.name, inputs)
        rows.append((version.name, plain, instrumented))
        slow |= plain > BOUNDS["plain"] or instrumented > BOUNDS["instrumented"]
    rows.append(("bound", *BOUNDS.values()))
    shape = "B={}, H={}, M=N={}, D={}".format(*SHAPE)
    print(f"Seconds for {shape} on {min(CORES, os.cpu_count())} cores, best of {RUNS}")
    print(tabulate(rows, headers=("version", *BOUNDS), floatfmt=".3f"))
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
