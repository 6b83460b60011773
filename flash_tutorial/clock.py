"""How long functions take on a GPU, side by side, and what the GPU itself could do at most.

Every function is captured once as a CUDA graph, so that what Python takes to launch a short kernel is no part of its
time. `triton.testing.do_bench` replays and times it, with the L2 cache flushed before every repetition. Functions that
are measured together take turns, so that a GPU that warms up or slows down does so for all of them, and not every turn
begins with the same one, so that none is always the first after a pause.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

WARMUP, REPETITIONS = 5, 30  # replays before the first that counts, and those that count
ROUNDS = 3  # turns that functions take
SLOW = 1.0  # seconds that warming up may take, and of a call that has all its repetitions in one turn
PRODUCT, COPY = 8192, 2**30  # what ceilings are measured with: rows of square matrices, bytes


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median of all repetitions and the percentiles around it."""

    median: float
    p20: float
    p80: float

    @property
    def spread(self) -> float:
        """Half the distance between the percentiles, as a part of the median."""
        return (self.p80 - self.p20) / 2 / self.median

    def noise(self, base: Timing) -> bool:
        """Whether it differs from `base`, as a part of it, by less than the larger of the two spreads."""
        return abs(self.median / base.median - 1) < max(self.spread, base.spread)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Timing | None:
        """That of a row in results/ or of a run; None if it has none."""
        return cls(**row["microseconds"]) if "microseconds" in row else None


class Stopwatch:
    """One function as a CUDA graph, and how long its replays took.

    function  launches kernels on the current stream; it has been called before, so that nothing is left to build
    pool      memory that the graphs of functions which take turns may share (`torch.cuda.graph_pool_handle()`)
    """

    def __init__(self, function: Callable[[], object], pool: tuple[int, int] | None = None):
        self._function = function  # whose tensors the graph reads and writes
        self._replay = _captured(function, pool)
        self._milliseconds_each = 1.0  # about, with the flush of the cache
        self.milliseconds: list[float] = []  # of each repetition
        self.warmed = 0  # replays before the first repetition

    def warm(self, replays: int, patience: float = math.inf) -> None:
        """Replays that many times, or until `patience` seconds have passed."""
        started = time.perf_counter()
        for count in range(1, replays + 1):
            self._replay()
            _synchronize()
            passed = time.perf_counter() - started
            self.warmed += 1
            self._milliseconds_each = max(1.0, 1e3 * passed / count)
            if passed > patience:
                break

    def take(self, repetitions: int) -> None:
        """Adds exactly that many repetitions. do_bench takes milliseconds, and replays a few times of its own first.

        Raises RuntimeError where Triton, which it is a part of, is not installed.
        """
        bench = do_bench()
        wanted = len(self.milliseconds) + repetitions
        while (missing := wanted - len(self.milliseconds)) > 0:
            rep = self._milliseconds_each * (missing + 0.5)
            taken = bench(self._replay, warmup=0, rep=rep, return_mode="all")
            self.milliseconds += taken[:missing]
            if len(taken) > 1:  # do_bench's own estimate, which it keeps to itself
                self._milliseconds_each = rep / len(taken)
            elif missing > 1:
                self._milliseconds_each = max(taken[0], 2 * self._milliseconds_each)

    @property
    def seconds(self) -> float:
        """About how long a call takes, once it has been warmed up: no figure, but enough to plan with."""
        return self._milliseconds_each / 1e3

    @property
    def timing(self) -> Timing | None:
        """None before the first repetition."""
        import numpy

        if not self.milliseconds:
            return None
        return Timing(*(round(1e3 * float(x), 3) for x in numpy.percentile(self.milliseconds, (50, 20, 80))))


def turns(repetitions: int, rounds: int = ROUNDS) -> list[int]:
    """How many repetitions each turn has, so that they add up."""
    return [repetitions // rounds + (turn < repetitions % rounds) for turn in range(rounds)]


def order(names: Iterable[str], turn: int) -> list[str]:
    """Who comes after whom in a turn, from 0: each turn begins where a third more of the names is done."""
    names = list(names)
    first = len(names) * turn // ROUNDS
    return names[first:] + names[:first]


def measure(functions: dict[str, Callable[[], object]]) -> dict[str, Timing]:
    """The time of each function on the current GPU, the functions taking turns. Each has been called before.

    Raises RuntimeError where Triton, whose do_bench does the timing, is not installed.
    """
    watches = {name: Stopwatch(function) for name, function in functions.items()}
    for watch in watches.values():
        watch.warm(WARMUP, SLOW)
    for turn, repetitions in enumerate(turns(REPETITIONS)):
        for name in order(watches, turn):
            watches[name].take(repetitions)
    return {name: watch.timing for name, watch in watches.items()}


def ceilings(dtypes: Iterable[str]) -> dict:
    """What the current GPU reaches at most, measured: {"tflops": {dtype: TFLOP/s of a product of two matrices of 8192
    rows and columns}, "copy_tb_s": TB/s of a copy of 1 GiB in its memory, bytes read and written}.

    float32 is multiplied as such, without TF32. What the GPU's memory has no room for is left out.
    """
    found: dict = {"tflops": {}}
    if microseconds := _time_of(_copy):
        found["copy_tb_s"] = round(2 * COPY / microseconds / 1e6, 3)
    for dtype in dict.fromkeys(dtypes):
        if microseconds := _time_of(lambda: _product(dtype)):
            found["tflops"][dtype] = round(2 * PRODUCT**3 / microseconds / 1e6, 2)
    return found


def _copy() -> Callable[[], object]:
    import torch

    source = torch.randn(COPY // 4, device="cuda")
    target = torch.empty_like(source)
    # A kernel: the driver's memory copy, which copy_ becomes in a CUDA graph, is slower (2.7 TB/s on an H200).
    return lambda: torch.mul(source, 1, out=target)


def _product(dtype: str) -> Callable[[], object]:
    import torch

    a, b = (torch.randn(PRODUCT, PRODUCT, device="cuda").to(getattr(torch, dtype)) for _ in range(2))
    return lambda: a @ b


def _time_of(make: Callable[[], Callable[[], object]]) -> float | None:
    """Microseconds of the function that `make` makes; None where the GPU's memory has no room for its tensors."""
    import torch

    from flash_tutorial.reference import full_precision

    try:
        function = make()
        with full_precision():
            function()
            return measure({"": function})[""].median
    except torch.OutOfMemoryError:
        return None


def do_bench() -> Callable:
    """Triton's do_bench. Raises RuntimeError where there is none."""
    try:
        from triton.testing import do_bench
    except ImportError as error:
        raise RuntimeError(
            "timing needs Triton's do_bench; CUDA builds of torch for Linux bring it (pip install triton)"
        ) from error
    return do_bench


def _captured(function: Callable[[], object], pool: tuple[int, int] | None) -> Callable[[], None]:
    """A CUDA graph's replay of what `function` launches."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        function()
    return graph.replay


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()
