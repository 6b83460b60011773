"""The SIMT emulator seen from Python: which line of a kernel costs what, and which line is wrong.

    with emulator.instrument() as report:                       # CPU calls in here run the instrumented builds
        flash_tutorial.attention(q, k, v, version="v03")
    print(report.table())                                       # counters by source line
    report.totals.shared_load_conflicts                         # and in total

    module = emulator.compile(Path("my_kernel.cu"))             # or the text of one
    report = module.launch("transpose", (4, 4), (32, 8), source, destination, 128)

A race, a read of unwritten shared memory, an access out of bounds, a deadlock, … raises `KernelFinding`, which names
the kernel, the block, the threads and the source lines. How the machine works: kernels/emulator/README.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import linecache
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from flash_tutorial import build
from flash_tutorial.versions import KERNELS

#: Dynamic shared memory that one block may have, in bytes, by architecture (CUDA C++ Programming Guide, table of
#: compute capabilities; static arrays come out of the same budget on a GPU, but are not counted here).
SHARED_MEMORY_PER_BLOCK = {
    "sm_70": 96 * 1024,
    "sm_75": 64 * 1024,
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_87": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}

PROGRESS_BAR_AFTER = 2.0  # seconds


# ---------------------------------------------------------------------------------------------------------- counters


def _counter(meaning: str, metric: str | None, why_not: str = "") -> int:
    """`metric` is Nsight Compute's metric that equals the counter, or a sum and difference of several; METRIC[OPCODE]
    is one opcode's share of a metric that is given by opcode. None: there is none, and `why_not` says why."""
    return field(default=0, metadata={"meaning": meaning, "metric": metric, "why_not": why_not})


_OPCODE = "sass__inst_executed_per_opcode"
_SECTORS_TELL = "Nsight Compute counts the sectors that move, not the bytes that lanes ask for"


@dataclass(frozen=True)
class Counters:
    """What warps did, counted as Nsight Compute counts it. `Counters.glossary()` explains each number.

    A request is one instruction of one warp; a sector is 32 bytes of global memory; a wavefront is one pass over the 32
    banks of shared memory."""

    global_load_requests: int = _counter(
        "warp instructions that read global memory, cp.async included",
        "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    )
    global_load_sectors: int = _counter(
        "sectors that those touch; 4-byte loads of neighbouring lanes need 4 a request",
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    )
    global_load_bytes: int = _counter(
        "bytes that the lanes asked for (a broadcast counts once a lane)", None, _SECTORS_TELL
    )
    global_store_requests: int = _counter(
        "warp instructions that write global memory", "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum"
    )
    global_store_sectors: int = _counter("sectors that those touch", "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum")
    global_store_bytes: int = _counter("bytes that the lanes wrote", None, _SECTORS_TELL)
    shared_load_requests: int = _counter(
        "warp instructions that read shared memory, ldmatrix included",
        "smsp__sass_inst_executed_op_shared_ld.sum + smsp__sass_inst_executed_op_ldsm.sum",
    )
    shared_load_wavefronts: int = _counter(
        "passes that those need", "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"
    )
    shared_load_conflicts: int = _counter(
        "passes beyond what the same bytes need when spread over all banks: the cost of bank conflicts",
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    )
    shared_store_requests: int = _counter(
        "warp instructions that write shared memory, stmatrix included", "smsp__sass_inst_executed_op_shared_st.sum"
    )
    shared_store_wavefronts: int = _counter(
        "passes that those need", "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum"
    )
    shared_store_conflicts: int = _counter(
        "passes beyond the conflict-free number", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum"
    )
    ldmatrix: int = _counter("ldmatrix instructions", "smsp__sass_inst_executed_op_ldsm.sum")
    stmatrix: int = _counter("stmatrix instructions", f"{_OPCODE}[STSM]")
    cp_async: int = _counter("cp.async instructions", "smsp__sass_inst_executed_op_ldgsts.sum")
    cp_async_wavefronts: int = _counter(
        "passes in which cp.async writes shared memory",
        "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldgsts.sum",
    )
    mma: int = _counter(
        "mma.sync instructions",
        "sm__inst_executed_pipe_tensor_op_hmma.sum - sm__inst_executed_pipe_tensor_op_hmma_type_hfma2.sum",
    )
    shuffles: int = _counter("shuffles", f"{_OPCODE}[SHFL]")
    votes: int = _counter(
        "votes, ballots, matches and warp reductions", f"{_OPCODE}[VOTE] + {_OPCODE}[MATCH] + {_OPCODE}[REDUX]"
    )
    barriers: int = _counter("block and named barriers, counted once a warp", f"{_OPCODE}[BAR]")
    syncwarps: int = _counter("__syncwarp", None, "nvcc leaves it out where it knows the warp to be together")
    atomics: int = _counter(
        "warp instructions that are atomic", f"{_OPCODE}[ATOM] + {_OPCODE}[ATOMG] + {_OPCODE}[ATOMS] + {_OPCODE}[RED]"
    )

    @classmethod
    def metrics(cls) -> dict[str, str]:
        """Counter → what it equals in Nsight Compute, for those that equal something: see `_counter`."""
        return {f.name: f.metadata["metric"] for f in fields(cls) if f.metadata["metric"]}

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def global_load_sectors_per_request(self) -> float:
        """Coalescing: 4 is ideal for a full warp's 4-byte loads, 8 for 8-byte, 16 for 16-byte, 1 for a broadcast."""
        return self.global_load_sectors / max(self.global_load_requests, 1)

    @property
    def global_store_sectors_per_request(self) -> float:
        return self.global_store_sectors / max(self.global_store_requests, 1)

    @property
    def shared_load_ways(self) -> float:
        """Bank conflicts: 1 is free of them; 8 says that each pass was repeated 8 times."""
        return self.shared_load_wavefronts / max(self.shared_load_wavefronts - self.shared_load_conflicts, 1)

    @property
    def shared_store_ways(self) -> float:
        return self.shared_store_wavefronts / max(self.shared_store_wavefronts - self.shared_store_conflicts, 1)

    @classmethod
    def glossary(cls, fmt: str = "simple") -> str:
        """Every counter, what it counts, and the Nsight Compute metric that equals it: a table in tabulate's `fmt`."""
        from tabulate import tabulate

        rows = [
            (f.name, f.metadata["meaning"], f.metadata["metric"] or f"none: {f.metadata['why_not']}")
            for f in fields(cls)
        ]
        return tabulate(rows, headers=("counter", "counts", "Nsight Compute"), tablefmt=fmt)


def site_counters(site: dict) -> Counters:
    """The counters of one instruction, as the emulator lists it: {"op", "requests", "sectors", "wavefronts", …}."""
    op, requests = site["op"], site["requests"]
    excess = site["wavefronts"] - site["ideal"]
    match op:
        case "global_load" | "global_store":
            return Counters(
                **{
                    f"{op}_requests": requests,
                    f"{op}_sectors": site["sectors"],
                    f"{op}_bytes": site["lanes"] * site["bytes"],
                }
            )
        case "shared_load" | "shared_store":
            return Counters(
                **{f"{op}_requests": requests, f"{op}_wavefronts": site["wavefronts"], f"{op}_conflicts": excess}
            )
        case "ldmatrix":
            return Counters(
                ldmatrix=requests,
                shared_load_requests=requests,
                shared_load_wavefronts=site["wavefronts"],
                shared_load_conflicts=excess,
            )
        case "stmatrix":
            return Counters(
                stmatrix=requests,
                shared_store_requests=requests,
                shared_store_wavefronts=site["wavefronts"],
                shared_store_conflicts=excess,
            )
        case "cp_async":
            return Counters(
                cp_async=requests,
                cp_async_wavefronts=site["wavefronts"],
                global_load_requests=site["reads"],
                global_load_sectors=site["sectors"],
                global_load_bytes=site["read_bytes"],
            )
        case "atomic":
            return Counters(atomics=requests)
        case "shuffle":
            return Counters(shuffles=requests)
        case "vote" | "match" | "reduce":
            return Counters(votes=requests)
        case "mma":
            return Counters(mma=requests)
        case "barrier":
            return Counters(barriers=requests)
        case "syncwarp":
            return Counters(syncwarps=requests)
        case _:
            return Counters()


# ------------------------------------------------------------------------------------------------------ source lines


@dataclass(frozen=True)
class Location:
    """A line of source. `header`, if any, is the line of a header of ours (flash/…) that was inlined there."""

    file: str
    line: int
    function: str = ""
    header: Location | None = None

    @property
    def text(self) -> str:
        """The line as it reads, without the spaces around it; empty if the file is not there."""
        linecache.checkcache(self.file)
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        path = Path(self.file)
        if path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        return f"{path}:{self.line}" if self.line else str(path)


def _lies_in(location: Location, *directories: Path) -> bool:
    return any(Path(location.file).is_relative_to(directory) for directory in directories)


def _function_name(name: str) -> str:
    """`void (anonymous namespace)::scale<64>(float*, int)` → `scale<64>`."""
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    depth = 0
    for i, character in enumerate(name):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0:
            return name[:i]
    return name


class _Symbols:
    """Source lines of one library's addresses, asked from addr2line in as few batches as callers make."""

    def __init__(self, module: str):
        self.module = module
        self.frames: dict[int, tuple[Location, ...]] = {}  # address → frames, innermost first

    def prefetch(self, addresses: Iterable[int]) -> None:
        missing = sorted(set(addresses) - self.frames.keys())
        if not missing:
            return
        command = ["addr2line", "-e", self.module, "-a", "-i", "-f", "-C"]
        try:
            asked = "".join(f"{address:#x}\n" for address in missing)
            output = subprocess.run(command, input=asked, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):  # no binutils here: say where in the library it was
            self.frames |= {address: (Location(f"{self.module}+{address:#x}", 0),) for address in missing}
            return
        for block in re.split(r"^(?=0x[0-9a-f]+$)", output, flags=re.MULTILINE):
            if not block:
                continue
            address, *pairs = block.splitlines()
            frames = []
            for function, place in zip(pairs[::2], pairs[1::2], strict=True):
                file, _, line = place.partition(" (discriminator")[0].rpartition(":")
                known = line.isdigit() and int(line) > 0
                frames.append(Location(os.path.normpath(file), int(line) if known else 0, _function_name(function)))
            self.frames[int(address, 16)] = tuple(frames)

    def location(self, address: int) -> Location:
        """The innermost line of the kernel's own file, with that of our header (flash/…) that was inlined there."""
        self.prefetch([address])
        frames = [frame for frame in self.frames[address] if not _lies_in(frame, KERNELS / "emulator", Path("/usr"))]
        ours = [frame for frame in frames if _lies_in(frame, KERNELS / "include")]
        own = next((frame for frame in frames if frame.line and frame not in ours), None)
        if own is None:
            return (frames or self.frames[address])[0]
        header = ours[0] if ours and frames.index(ours[0]) < frames.index(own) else None
        return Location(own.file, own.line, own.function, header)

    def function(self, address: int) -> str:
        self.prefetch([address])
        outermost = self.frames[address][-1]
        return outermost.function or Path(str(outermost)).name


@functools.cache
def _symbols(module: str) -> _Symbols:
    return _Symbols(module)


# ---------------------------------------------------------------------------------------------------------- findings


@dataclass(frozen=True)
class Kind:
    title: str
    meaning: str
    remedy: str


#: The kinds of findings: what each is called, why it matters, how it is mended.
KINDS = {
    "race": Kind(
        "data race",
        "two threads touch the same bytes, one of them writes, and nothing makes either come first: on a GPU the "
        "result depends on luck",
        "put a barrier between the two lines, reached by every thread that shares the data: __syncthreads() across "
        "warps, __syncwarp() inside one",
    ),
    "uninitialized": Kind(
        "read of unwritten memory",
        "no thread has written these bytes in this block: a GPU gives whatever the last block left there",
        "write the whole tile first (the tail too: fill it with zeros), or do not read past what was written",
    ),
    "out_of_bounds": Kind(
        "access out of bounds",
        "the address lies outside every buffer the kernel was given: a GPU reads or overwrites a neighbour's bytes",
        "guard the access (`if (row < rows)`), or mend the index",
    ),
    "write_to_input": Kind(
        "write to an input",
        "the caller passed this buffer to be read only",
        "write to the output, or to shared memory or the workspace",
    ),
    "misaligned": Kind(
        "misaligned access",
        "an access of 4, 8 or 16 bytes needs an address that is a multiple of its size: a GPU stops the kernel here",
        "make the offset a multiple of the access's size, or access narrower elements",
    ),
    "missing_wait": Kind(
        "asynchronous copy used too early",
        "the bytes of a cp.async are there only after cp.async.wait_group in the thread that issued it (and, for other "
        "threads, a barrier after that)",
        "wait for the group before the barrier: `cp_async_wait_group<N>()` leaves the N youngest groups in flight",
    ),
    "divergent_barrier": Kind(
        "divergent barrier",
        "not all threads come to the same barrier: a GPU takes one barrier for another, or hangs",
        "move the barrier out of the branch, so that every thread reaches the same one",
    ),
    "warp_mask": Kind(
        "wrong warp mask",
        "a collective whose mask leaves out a lane that calls it, or a shuffle from a lane that takes no part, has no "
        "defined result on a GPU",
        "name in the mask every lane that executes the instruction, and only those: 0xffffffff for a whole warp",
    ),
    "deadlock": Kind(
        "deadlock",
        "every live thread waits for another: nothing can ever run again",
        "make each thread named in the mask, and each thread counted by the barrier, reach it",
    ),
    "crash": Kind(
        "crash",
        "the emulated thread raised a hardware fault: a wild address, a stack overflow, an integer division by zero",
        "check the pointer, the size of local arrays, the divisor",
    ),
    "shared_memory_budget": Kind(
        "too much shared memory",
        "the block asks for more than the architecture has: the launch fails there",
        "use smaller tiles or fewer stages, or let two tiles share a buffer",
    ),
    "invalid_launch": Kind(
        "invalid launch",
        "a GPU refuses this grid or block",
        "a block has 1 to 1024 threads (z at most 64); a grid's x is at most 2^31-1, its y and z at most 65,535",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a kernel. `str()` of it is the full explanation."""

    kind: str
    kernel: str
    block: tuple[int, int, int]
    threads: tuple[int, ...]  # index in the block, x fastest
    locations: tuple[Location, ...]  # where each of `threads` was
    actions: tuple[str, ...]  # what each did there, e.g. "shared_store"; empty if not known
    space: str  # "shared" or "global"; empty where it makes no sense
    buffer: str  # name of the global buffer
    offset: int  # bytes from the start of the buffer or of shared memory
    bytes: int
    count: int  # how often it happened
    detail: str

    @property
    def message(self) -> str:
        """Several lines of text: what, where, why it matters, how to mend it."""
        kind = KINDS[self.kind]
        where = {"shared": " in shared memory", "global": " in global memory"}.get(self.space, "")
        threads = [thread for thread in self.threads if thread >= 0]
        named = f", thread{'s' * (len(threads) > 1)} " + " and ".join(map(str, threads)) if threads else ""
        times = f" ({self.count:,} times; the first is shown)" if self.count > 1 else ""
        lines = [f"{kind.title}{where}: kernel {self.kernel}, block {self.block}{named}{times}"]
        for i, location in enumerate(self.locations):
            thread = self.threads[i] if i < len(self.threads) and self.threads[i] >= 0 else None
            who = f"thread {thread} (warp {thread // 32}, lane {thread % 32})" if thread is not None else "here"
            action = self.actions[i].replace("_", " ") if i < len(self.actions) and self.actions[i] else ""
            inlined = f"  (through {location.header})" if location.header else ""
            lines.append(f"    {who}{action and ', ' + action}: {location}{inlined}")
            if location.text:
                lines.append(f"        {location.text}")
        if self.bytes:
            place = (
                repr(self.buffer) if self.buffer else {"shared": "shared memory"}.get(self.space, "the address space")
            )
            lines.append(f"    {self.bytes} bytes at byte {self.offset} of {place}")
        if self.detail:
            lines.append(f"    seen: {self.detail.rstrip('.')}.")
        lines.append(f"    means: {kind.meaning}.")
        lines.append(f"    to mend it: {self._remedy(kind)}.")
        return "\n".join(lines)

    def _remedy(self, kind: Kind) -> str:
        if self.kind == "race" and self.space == "global":
            return (
                "within a block, put a barrier between the two lines; nothing orders two blocks: give each a part of "
                "its own, use atomics, or make it two launches"
            )
        if self.kind == "race" and len(self.threads) == 2 and min(self.threads) >= 0:
            if self.threads[0] // 32 == self.threads[1] // 32:
                return "the threads are of one warp: __syncwarp() between the two lines orders them"
            return "the threads are of two warps: __syncthreads() between the two lines orders them"
        return kind.remedy

    __str__ = message.fget


class KernelFinding(RuntimeError):
    """A kernel did something that a GPU would punish or, worse, let pass. `.findings` holds every `Finding`."""

    SHOWN = 4

    def __init__(self, findings: Iterable[Finding]):
        self.findings = tuple(findings)
        super().__init__(self.findings)

    def __str__(self) -> str:
        shown = [finding.message for finding in self.findings[: self.SHOWN]]
        if len(self.findings) > self.SHOWN:
            shown.append(f"… and {len(self.findings) - self.SHOWN} more (see .findings)")
        return "\n".join(shown)


# ------------------------------------------------------------------------------------------------------------ report


@dataclass(frozen=True)
class LineCounters:
    """What one line of source cost, all its instructions together."""

    file: str
    line: int
    text: str
    counters: Counters


@dataclass(frozen=True)
class Launch:
    """One kernel launch on the emulator. `sites` are its instructions as the emulator lists them, by address."""

    module: str
    address: int
    instrumented: bool
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    blocks_total: int
    blocks_run: int
    seconds: float
    sites: tuple[dict, ...] = field(repr=False)
    raw_findings: tuple[dict, ...] = field(repr=False)

    @classmethod
    def _from_json(cls, entry: dict) -> Launch:
        return cls(
            module=entry["module"],
            address=entry["kernel"],
            instrumented=entry["instrumented"],
            grid=tuple(entry["grid"]),
            block=tuple(entry["block"]),
            shared_bytes=entry["shared_bytes"],
            blocks_total=entry["blocks_total"],
            blocks_run=entry["blocks_run"],
            seconds=entry["seconds"],
            sites=tuple(entry["sites"]),
            raw_findings=tuple(f for f in entry["findings"] if f["kind"] != "cancelled"),
        )

    def _addresses(self) -> Iterator[int]:
        """All that a report shows. A site's address is that of the instruction after it: one less lies inside it."""
        yield self.address
        yield from (site["pc"] - 1 for site in self.sites)
        yield from (pc - 1 for finding in self.raw_findings for pc in finding["pcs"] if pc)

    @functools.cached_property
    def kernel(self) -> str:
        """The kernel's name with its template arguments."""
        return _symbols(self.module).function(self.address)

    @functools.cached_property
    def counters(self) -> Counters:
        return sum(map(site_counters, self.sites), Counters())

    @functools.cached_property
    def findings(self) -> tuple[Finding, ...]:
        if not self.raw_findings:
            return ()  # no need for the symbols, which take a moment
        symbols = _symbols(self.module)
        symbols.prefetch(self._addresses())
        actions = {site["pc"]: site["op"] for site in self.sites}
        return tuple(
            Finding(
                kind=raw["kind"],
                kernel=self.kernel,
                block=tuple(raw["block"]),
                threads=tuple(thread for thread, pc in zip(raw["threads"], raw["pcs"], strict=False) if pc)
                or tuple(raw["threads"]),
                locations=tuple(symbols.location(pc - 1) for pc in raw["pcs"] if pc),
                actions=tuple(actions.get(pc, "") for pc in raw["pcs"] if pc),
                space=raw["space"],
                buffer=raw["buffer"],
                offset=raw["offset"],
                bytes=raw["bytes"],
                count=raw["count"],
                detail=raw["detail"],
            )
            for raw in self.raw_findings
        )


_COLUMNS = {
    "global loads": lambda c: c.global_load_requests,
    "sectors /load": lambda c: c.global_load_sectors_per_request,
    "global stores": lambda c: c.global_store_requests,
    "sectors /store": lambda c: c.global_store_sectors_per_request,
    "shared loads": lambda c: c.shared_load_requests,
    "load wavefronts": lambda c: c.shared_load_wavefronts,
    "load conflicts": lambda c: c.shared_load_conflicts,
    "shared stores": lambda c: c.shared_store_requests,
    "store wavefronts": lambda c: c.shared_store_wavefronts,
    "store conflicts": lambda c: c.shared_store_conflicts,
    "ldmatrix": lambda c: c.ldmatrix,
    "stmatrix": lambda c: c.stmatrix,
    "cp.async": lambda c: c.cp_async,
    "mma": lambda c: c.mma,
    "shuffles": lambda c: c.shuffles,
    "votes": lambda c: c.votes,
    "barriers": lambda c: c.barriers,
    "syncwarps": lambda c: c.syncwarps,
    "atomics": lambda c: c.atomics,
}


@dataclass
class Report:
    """Everything that the emulator saw in some launches."""

    launches: list[Launch] = field(default_factory=list)

    @property
    def totals(self) -> Counters:
        return sum((launch.counters for launch in self.launches), Counters())

    @property
    def findings(self) -> list[Finding]:
        return [finding for launch in self.launches for finding in launch.findings]

    @property
    def lines(self) -> list[LineCounters]:
        """Counters by line of the kernels' own files, in the order of the files and lines."""
        self._prefetch()
        totals: dict[tuple[str, int], Counters] = {}
        text: dict[tuple[str, int], str] = {}
        for launch in self.launches:
            for site in launch.sites:
                location = _symbols(launch.module).location(site["pc"] - 1)
                key = (location.file, location.line)
                totals[key] = totals.get(key, Counters()) + site_counters(site)
                text[key] = location.text
        return [LineCounters(*key, text[key], totals[key]) for key in sorted(totals)]

    def line(self, text: str) -> LineCounters:
        """The counters of the only line whose source contains `text`; LookupError if there is none, or several."""
        found = [line for line in self.lines if text in line.text]
        if len(found) != 1:
            raise LookupError(
                f"{len(found)} counted lines contain {text!r}: " + "; ".join(x.text for x in found or self.lines)
            )
        return found[0]

    def table(self, fmt: str = "simple", width: int = 50) -> str:
        """Counters by source line and in total, in tabulate's format `fmt` ("simple", "github", "html", …).

        Columns that are zero everywhere are left out, source text is cut at `width` characters."""
        from tabulate import tabulate

        lines, totals = self.lines, self.totals
        columns = {name: value for name, value in _COLUMNS.items() if value(totals)}
        rows = [
            [
                f"{Path(line.file).name}:{line.line}",
                line.text[:width],
                *(value(line.counters) or "" for value in columns.values()),
            ]
            for line in lines
        ]
        rows.append(["total", "", *(value(totals) for value in columns.values())])
        names = [name.replace(" ", "\n") if fmt == "simple" else name for name in columns]
        return tabulate(rows, headers=["line", "source", *names], tablefmt=fmt, floatfmt=".4g", intfmt=",")

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return self.table("html")

    def _prefetch(self) -> None:
        for module in {launch.module for launch in self.launches}:
            _symbols(module).prefetch(
                a for launch in self.launches if launch.module == module for a in launch._addresses()
            )


# ------------------------------------------------------------------------------------------- the machine and its calls

_Tick = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)


@functools.cache
def runtime() -> ctypes.CDLL:
    """The emulator's library, built if need be; its functions are those of kernels/emulator/README.md."""
    library = ctypes.CDLL(str(build.runtime()), mode=ctypes.RTLD_GLOBAL)
    library.emulator_configure.argtypes = [ctypes.c_int, ctypes.c_size_t, _Tick]
    library.emulator_declare_global.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_int]
    library.emulator_report.restype = ctypes.c_char_p
    for name in ("configure", "declare_global", "forget_globals", "clear_report"):
        getattr(library, f"emulator_{name}").restype = None
    return library


@dataclass
class _Settings:
    arch: str = "sm_90"
    threads: int = 0


_settings = _Settings()
_lock = threading.RLock()  # one launch at a time; a launch uses every core by itself


def configure(arch: str | None = None, threads: int | None = None) -> None:
    """Which GPU to be (its shared memory is enforced; "sm_90" unless told), and on how many of this machine's cores
    blocks run (0, as at first: on all). What is left out stays. Raises ValueError for what is not known."""
    arch = _settings.arch if arch is None else arch
    threads = _settings.threads if threads is None else threads
    if arch not in SHARED_MEMORY_PER_BLOCK:
        raise ValueError(f"arch={arch!r} is not known to the emulator; known are {', '.join(SHARED_MEMORY_PER_BLOCK)}")
    if threads < 0:
        raise ValueError(f"threads={threads}: a number of threads, or 0 for one a core, is accepted")
    _settings.arch, _settings.threads = arch, threads


@dataclass(eq=False)  # two that are open may look alike
class _Instrumentation:
    report: Report
    raise_on_finding: bool


_active: list[_Instrumentation] = []  # innermost last


def is_instrumenting() -> bool:
    """Whether CPU calls should run the instrumented builds, because an `instrument()` is open."""
    return bool(_active)


@contextlib.contextmanager
def instrument(arch: str | None = None, raise_on_finding: bool = True, threads: int | None = None) -> Iterator[Report]:
    """CPU calls inside run instrumented, for the whole process; the `Report` fills as they are made.

    A finding raises `KernelFinding` from the call that made it, or, with `raise_on_finding=False`, is only listed in
    `report.findings`. `arch` and `threads` are as in `configure`, for the time being. Inside another `instrument()`,
    both reports fill."""
    before = dataclasses.replace(_settings)
    configure(arch, threads)
    instrumentation = _Instrumentation(Report(), raise_on_finding)
    _active.append(instrumentation)
    try:
        yield instrumentation.report
    finally:
        _active.remove(instrumentation)
        configure(before.arch, before.threads)


class _Watch:
    """One call under way: its progress bar, and a Ctrl-C kept until the emulator has stopped.

    Python would raise KeyboardInterrupt in the first bytecode it runs, which is inside the emulator's callback, where
    an exception is lost. So the signal only sets a flag here, the callback asks for cancellation, and the interrupt is
    raised once the emulator has returned."""

    def __init__(self) -> None:
        self.interrupted = False
        self.started = time.time()
        self.bar = None

    def tick(self, blocks_done: int, blocks_total: int) -> int:
        if self.bar is None and time.time() - self.started > PROGRESS_BAR_AFTER and _somebody_is_watching():
            from tqdm import tqdm

            self.bar = tqdm(desc="emulating", unit="block", leave=False, dynamic_ncols=True)
            self.bar.start_t = self.started
        if self.bar is not None:
            self.bar.total = blocks_total
            self.bar.n = blocks_done
            self.bar.refresh()
        return int(self.interrupted)

    def __enter__(self) -> _Watch:
        self.handler = signal.getsignal(signal.SIGINT)
        self.handles = threading.current_thread() is threading.main_thread() and callable(self.handler)
        if self.handles:
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def _interrupt(self, signum: int, frame: Any) -> None:
        self.interrupted = True

    def __exit__(self, *exception: object) -> None:
        if self.handles:
            signal.signal(signal.SIGINT, self.handler)
        if self.bar is not None:
            self.bar.close()


def _somebody_is_watching() -> bool:
    """A terminal, or a notebook that a person has opened (Jupyter's server says so): no log, no stored notebook."""
    return sys.stderr.isatty() or "JPY_SESSION_NAME" in os.environ


_watch = _Watch()


@_Tick
def _tick(blocks_done: int, blocks_total: int) -> int:
    return _watch.tick(blocks_done, blocks_total)


@contextlib.contextmanager
def launching(raise_on_finding: bool | None = None) -> Iterator[Report]:
    """Around every call that launches emulated kernels: one at a time, with Ctrl-C and a progress bar, and afterwards
    the launches added to each open `instrument()`'s report. It gives a `Report` of this call alone, filled at the end.

    Raises KernelFinding if a kernel did wrong (where `raise_on_finding` is None, the innermost `instrument()` decides,
    and outside of any it does), and KeyboardInterrupt if Ctrl-C cancelled the call."""
    global _watch
    report = Report()
    with _lock:
        library = runtime()
        library.emulator_configure(_settings.threads, SHARED_MEMORY_PER_BLOCK[_settings.arch], _tick)
        library.emulator_clear_report()
        with _Watch() as _watch:
            try:
                yield report
            finally:
                entries = json.loads(library.emulator_report())["launches"]
                library.emulator_clear_report()
                report.launches += map(Launch._from_json, entries)
                for instrumentation in _active:
                    instrumentation.report.launches += report.launches
        if _watch.interrupted:
            raise KeyboardInterrupt
        if raise_on_finding is None:
            raise_on_finding = _active[-1].raise_on_finding if _active else True
        if raise_on_finding and report.findings:
            raise KernelFinding(report.findings)


# ----------------------------------------------------------------------------------------------------- small kernels


class Module:
    """A `.cu` compiled for the emulator, whose `__global__` functions Python launches by name. Made by `compile`."""

    def __init__(self, library: Path, source: Path, kernels: dict[str, list[str]], instrumented: bool):
        self.library = library
        self.source = source
        self.instrumented = instrumented
        self._parameters = kernels
        self._library = ctypes.CDLL(str(library))

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(self._parameters)

    def launch(
        self,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *arguments: Any,
        shared_bytes: int = 0,
        raise_on_finding: bool | None = None,
    ) -> Report:
        """`kernel<<<grid, block, shared_bytes>>>(*arguments)`; returns when it is done.

        A pointer takes a C-contiguous NumPy array or CPU tensor whose elements have the pointee's size, or None; what
        it points to is read-only where the parameter is `const`. Numbers take Python or NumPy numbers, structs take
        bytes. `grid` and `block` are 1 to 3 sizes, x first. Raises TypeError, ValueError or OverflowError for arguments
        that do not fit, `KernelFinding` for what the kernel does wrong, as `launching` does."""
        if kernel not in self._parameters:
            raise ValueError(f"{self.source.name} has no kernel {kernel!r}; it has {', '.join(self.kernels)}")
        names = self._parameters[kernel]
        signature = ctypes.create_string_buffer(4096)
        getattr(self._library, f"emulator_signature_{kernel}")(signature, ctypes.c_size_t(len(signature)))
        codes = signature.value.decode().split()
        if len(arguments) != len(codes):
            raise TypeError(f"{kernel} takes {len(codes)} arguments ({', '.join(names)}); {len(arguments)} came")
        values = [_argument(f"{kernel}: {n}", code, a) for n, code, a in zip(names, codes, arguments, strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        launch = getattr(self._library, f"emulator_launch_{kernel}")
        launch.argtypes = [ctypes.c_uint * 3, ctypes.c_uint * 3, ctypes.c_size_t, ctypes.c_void_p]
        launch.restype = None
        sizes = [(ctypes.c_uint * 3)(*_three(what, size)) for what, size in (("grid", grid), ("block", block))]
        with launching(raise_on_finding) as report:
            runtime().emulator_forget_globals()
            for name, code, value, argument in zip(names, codes, values, arguments, strict=True):
                if code[0] in "rw" and argument is not None:
                    runtime().emulator_declare_global(value, argument.nbytes, name.encode(), code[0] == "w")
            launch(*sizes, shared_bytes, pointers)
            runtime().emulator_forget_globals()
        return report


def compile(source: str | os.PathLike, instrumented: bool = True) -> Module:
    """A small `.cu` for the emulator: a file's path, or source text.

    Every `__global__ void name(…)` that is no template and in no named namespace can be launched from Python. Nothing
    need be included for CUDA's own names; `#include "flash/…"` works. Compiled once for each content. Raises
    FileNotFoundError for a path that is not there, ValueError for a source without kernels, `build.BuildError` with
    the compiler's words for one that does not compile."""
    if isinstance(source, str) and "__global__" in source:
        path = build.scratch_source(source)
    else:
        path = Path(source).resolve()
        if not path.is_file():
            raise FileNotFoundError(f"{path} is no file, nor is it source text with a __global__ function")
    kernels = _kernels(path.read_text(encoding="utf-8", errors="replace"))
    if not kernels:
        raise ValueError(f"{path} has no __global__ function that is not a template")
    runtime()  # its symbols are there when the module is loaded
    exports = "".join(f"EMULATOR_EXPORT({name})\n" for name in kernels)
    wrapper = f'#include <emulator/cuda.h>\n#include "{path}"\n#include <emulator/export.h>\n{exports}'
    return Module(build.emulated_module(path, wrapper, instrumented), path, kernels, instrumented)


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LAUNCH_BOUNDS = r"(?:__launch_bounds__\s*\([^()]*\)\s*)?"
_KERNEL = re.compile(
    rf"(?P<template>template\s*<[^;{{}}]*>\s*)?(?:static\s+)?__global__\s+{_LAUNCH_BOUNDS}void\s+{_LAUNCH_BOUNDS}"
    r"(?P<name>\w+)\s*\((?P<parameters>[^{;]*)\)\s*\{"
)


def _kernels(text: str) -> dict[str, list[str]]:
    """Names of the kernels in a source, each with the names of its parameters."""
    kernels = {}
    for match in _KERNEL.finditer(_COMMENT.sub(" ", text)):
        if not match["template"]:
            parameters = re.split(r",(?![^<(]*[>)])", match["parameters"])
            kernels[match["name"]] = [
                re.findall(r"\w+", parameter)[-1] for parameter in parameters if parameter.strip()
            ]
    return kernels


def _three(what: str, size: int | Sequence[int]) -> tuple[int, int, int]:
    sizes = tuple(size) if isinstance(size, Sequence) else (size,)
    if not 1 <= len(sizes) <= 3 or not all(0 <= x < 2**32 for x in sizes):
        raise ValueError(f"{what}={size!r}: one to three sizes are accepted, x first")
    return sizes + (1,) * (3 - len(sizes))


_NUMBERS = {
    "i1": ctypes.c_int8, "i2": ctypes.c_int16, "i4": ctypes.c_int32, "i8": ctypes.c_int64,
    "u1": ctypes.c_uint8, "u2": ctypes.c_uint16, "u4": ctypes.c_uint32, "u8": ctypes.c_uint64,
    "f4": ctypes.c_float, "f8": ctypes.c_double,
}  # fmt: skip


def _argument(what: str, code: str, argument: Any) -> Any:
    """`argument` as the ctypes value that a parameter of this code takes; the codes are those of emulator/export.h."""
    if code[0] in "rw":
        return ctypes.c_void_p(_pointer(what, code[0] == "w", code[1], int(code[2:]), argument))
    kind, size = code[0], int(code[1:])
    if kind == "s":
        if len(bytes(argument)) != size:
            raise TypeError(f"{what} is a struct of {size} bytes; {len(bytes(argument))} came")
        return ctypes.create_string_buffer(bytes(argument), size)
    if kind == "f":
        return _NUMBERS[code](float(argument))
    value = _NUMBERS[code](int(argument))
    if value.value != argument:
        sign = "signed" if kind == "i" else "unsigned"
        raise OverflowError(f"{what} is a whole number of {size} bytes, {sign}; {argument!r} came")
    return value


def _pointer(what: str, written: bool, kind: str, size: int, argument: Any) -> int | None:
    """The address of an array that fits a pointer to elements of this kind and size (to a struct: any numbers)."""
    if argument is None:
        return None
    if hasattr(argument, "data_ptr"):  # a torch tensor
        floats, size_here, contiguous = argument.is_floating_point(), argument.element_size(), argument.is_contiguous()
        readonly, local, address = False, argument.device.type == "cpu", argument.data_ptr()
    elif hasattr(argument, "__array_interface__"):
        floats, size_here, contiguous = argument.dtype.kind == "f", argument.itemsize, argument.flags.c_contiguous
        readonly, local, address = not argument.flags.writeable, True, argument.ctypes.data
    else:
        raise TypeError(f"{what} is a pointer: a NumPy array or CPU tensor is accepted, {type(argument).__name__} came")
    if not local or not contiguous:
        raise ValueError(f"{what} takes a C-contiguous array in this machine's memory")
    if kind == "s":
        fits, wanted = size % size_here == 0, f"structs of {size} bytes"
    else:
        fits, wanted = size_here == size and floats == (kind == "f"), f"{size}-byte {_KIND_NAMES.get(kind)} elements"
    if kind != "v" and not fits:
        raise TypeError(f"{what} points to {wanted}; an array of {argument.dtype} came")
    if written and readonly:
        raise ValueError(f"{what} is written by the kernel, but the array is read-only")
    return address


_KIND_NAMES = {"f": "float", "i": "signed", "u": "unsigned"}
