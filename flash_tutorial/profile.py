"""What one version does to the machine: the emulator's counters by source line on a CPU, Nsight Compute's on a GPU.

    print(describe(profile("v03", Problem())))                    # on the emulator
    print(describe(profile("v03", Problem(device="cuda", batch=4, heads=12, queries=2048, keys=2048))))

Both count the same quantities, those of `emulator.Counters`. A GPU adds what depends on the chip: time, bytes from its
memory, occupancy. Beside each figure stands what it says, in words made from the figures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tabulate import tabulate
from tqdm import tqdm

from flash_tutorial import build, clock, compare, emulator, inspect, nsight, ops, registry, results
from flash_tutorial.problem import Problem
from flash_tutorial.reference import REFERENCES
from flash_tutorial.text import wrap
from flash_tutorial.versions import VERSIONS, Version

#: Blocks that an SM has room for, by what runs out first.
_LIMITS = {
    "registers": "launch__occupancy_limit_registers",
    "shared memory": "launch__occupancy_limit_shared_mem",
    "threads": "launch__occupancy_limit_warps",
    "blocks per SM": "launch__occupancy_limit_blocks",
}
#: How much of its peak a part of the chip is used, in percent.
_BUSY = {
    "issue slots": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "FP32 pipes": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "tensor cores": "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active",
    "L1 and shared memory": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "DRAM": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
}
_DURATION = "gpu__time_duration.sum"
_CLOCK = "sm__cycles_elapsed.avg.per_second"
_READ, _WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
_FROM_L2 = "l1tex__m_xbar2l1tex_read_bytes.sum"
_ACHIEVED = "sm__warps_active.avg.pct_of_peak_sustained_active"
_THEORETICAL = "sm__maximum_warps_per_active_cycle_pct"
_WAVES = "launch__waves_per_multiprocessor"
_REGISTERS = "launch__registers_per_thread"
_SHARED = ("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic")

METRICS = (
    *(_DURATION, _CLOCK, _READ, _WRITTEN, _FROM_L2, _ACHIEVED, _THEORETICAL, _WAVES, _REGISTERS, *_SHARED),
    *_LIMITS.values(),
    *_BUSY.values(),
    *nsight.needed(emulator.Counters.metrics().values()),
)

#: Seconds. A launch that takes longer is not looked at by instruction, which would take minutes.
LONG = 0.02


@dataclass(frozen=True)
class Profile:
    """One version on one problem.

    version   as tables call it
    counters  by name, those that the device counts: `emulator.Counters` says what they are
    lines     the same by line of source; on a GPU those of the machine code, so far as they could be found
    figures   a GPU's, by name with the unit in it; None where the GPU does not count it. Empty on a CPU
    warp_time (file, line) → on a GPU, the share of all warps' time that goes there, working or waiting
    report    the emulator's; None on a GPU
    notes     what is not known, and why
    """

    version: str
    title: str
    problem: Problem
    counters: dict[str, int]
    lines: Sequence[emulator.LineCounters] = ()
    figures: dict[str, float | int | str | None] = field(default_factory=dict)
    warp_time: dict[tuple[str, int], float] = field(default_factory=dict)
    report: emulator.Report | None = None
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """What the profile's table has: a figure's name, its value, and what that says."""
        return _emulated_rows(self) if self.report else _measured_rows(self)

    def _repr_html_(self) -> str:
        return tabulate(self.rows, _HEADERS, tablefmt="html", disable_numparse=True)


# ---------------------------------------------------------------------------------------------- taking


def profile(version: str | Version, problem: Problem, *, like: str | None = None, save: Path | None = None) -> Profile:
    """Profiles one call of a version, or of a reader's own .cu, on the problem's device.

    save  a .ncu-rep file for Nsight Compute's own window; on a GPU only
    like  the version whose dtypes and head sizes a .cu has whose file name does not say

    Raises ValueError for a name that is unknown, a version that launches several kernels, and a problem that it does
    not take; on a CPU what `emulator.instrument` raises, on a GPU what `nsight.measure` does.
    """
    version = find(version, like)
    compare.check_takes(version, problem)
    if problem.device == "cuda":
        return _measured(version, problem, save)
    if save is not None:
        raise ValueError(f"--save {save}: an Nsight Compute report is made on a GPU, with --device cuda")
    q, k, v = problem.tensors()
    with emulator.instrument() as report:
        ops.attention(q, k, v, version=version, causal=problem.causal, scale=problem.scale)
    counters = dataclasses.asdict(report.totals)
    return Profile(version.label, version.title, problem, counters, report.lines, report=report)


def find(version: str | Version, like: str | None = None) -> Version:
    """The fused version that is meant; else ValueError."""
    if version in REFERENCES:
        raise ValueError(
            f"{version} is PyTorch's and launches kernels of its own, mostly several: a profile is of one launch. "
            f"`flash-tutorial compare {version}` shows its time"
        )
    version = version if isinstance(version, Version) else compare.find_version(version, like)
    if not version.fused:
        raise ValueError(
            f"{version.label} launches several kernels: a profile is of one launch. On a CPU "
            f"`flash-tutorial run {version.label} --lines` counts them together"
        )
    return version


def _measured(version: Version, problem: Problem, save: Path | None) -> Profile:
    if problem.head_dim not in version.head_dims:
        sizes = ", ".join(map(str, version.head_dims))
        raise ValueError(
            f"head_dim is {problem.head_dim}: PyTorch's kernels pad it, and a profile is of one launch; on a GPU "
            f"{version.label} is profiled at {sizes}"
        )
    nsight.find_ncu()
    registry.operator(version, "cuda")  # what cannot be measured, or does not compile, says so before it is timed
    seconds = None if save else _seconds(version, problem)  # what is saved has all sections
    is_long = seconds is not None and seconds > LONG
    launches = nsight.measure_known(version, problem, METRICS, by_instruction=not is_long, save=save)
    if len(launches) != 1:
        kernels = ", ".join(launch.kernel for launch in launches)
        raise ValueError(f"{version.label} launches {len(launches)} kernels ({kernels}): a profile is of one launch")
    (launch,) = launches
    if is_long:
        note = f"one launch takes {1e3 * seconds:.0f} ms; a smaller problem has them."
        lines, samples, notes = [], {}, (f"Figures by line of source are not measured: {note}",)
    else:
        lines, samples, notes = _by_line(version, launch)
    every = sum(samples.values())
    return Profile(
        version.label,
        version.title,
        problem,
        nsight.counted(launch),
        lines,
        figures(launch, problem),
        warp_time={line: count / every for line, count in samples.items()} if every else {},
        notes=notes,
    )


def _seconds(version: Version, problem: Problem) -> float | None:
    """About how long a call takes. None where that cannot be told: of a kernel that fails ncu, which watches a process
    of its own, will say how."""

    def about() -> float:
        q, k, v = problem.tensors()
        call = functools.partial(ops.attention, q, k, v, version=version, causal=problem.causal, scale=problem.scale)
        call()
        watch = clock.Stopwatch(call)
        watch.warm(clock.WARMUP, clock.WARMUP * LONG)
        return watch.seconds

    seconds = None
    with contextlib.suppress(Exception):
        seconds = about()
    with contextlib.suppress(Exception):
        torch.cuda.empty_cache()  # the watched process needs the memory
    return seconds


def _by_line(
    version: Version, launch: nsight.Launch
) -> tuple[list[emulator.LineCounters], dict[tuple[str, int], int], tuple[str, ...]]:
    """Counters and samples of a launch by line of source, and what is to be noted if they are not known. Which line an
    instruction comes from is in the kernel's library."""
    if not launch.code:
        return [], {}, ("Figures by line of source are not known: ncu told of no instructions.",)
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    try:
        kernels = inspect.machine_code(version, arch)
    except (ValueError, build.BuildError) as error:
        return [], {}, (f"Figures by line of source are not known: {error}",)
    # Of several kernels the one whose code it is: names ncu and c++filt write in different ways. What does nothing
    # `inspect` leaves out.
    opcodes = {each.offset: each.opcode for each in launch.code}
    same = (sass for sass in kernels if sass and _opcodes(sass).items() <= opcodes.items())
    if not (sass := next(same, ())):
        return [], {}, ("Figures by line of source are not known: the kernel's library has other machine code.",)
    places = {each.offset: (each.file, each.line) for each in sass}
    counters: dict[tuple[str, int], emulator.Counters] = {}
    samples: dict[tuple[str, int], int] = {}
    for each in launch.code:
        if each.offset in places:
            line = places[each.offset]
            counters[line] = counters.get(line, emulator.Counters()) + each.counters
            samples[line] = samples.get(line, 0) + each.samples
    lines = [
        emulator.LineCounters(*line, linecache.getline(*line).strip(), counters[line])
        for line in sorted(counters)
        if line[0]
    ]
    return lines, samples, ()


def _opcodes(sass: Sequence[inspect.Instruction]) -> dict[int, str]:
    return {each.offset: each.opcode.partition(".")[0] for each in sass}


def figures(launch: nsight.Launch, problem: Problem) -> dict[str, float | int | str | None]:
    """What a profile keeps of a launch, as plain numbers with the unit in the name; None for what was not measured."""
    of = launch.metrics.get
    read, written = of(_READ), of(_WRITTEN)
    moved = None if read is None or written is None else read + written
    seconds = None if of(_DURATION) is None else of(_DURATION) * 1e-9
    limits = {name: int(of(metric)) for name, metric in _LIMITS.items() if of(metric) is not None}
    shared = [of(metric) for metric in _SHARED]
    return {
        "duration_us": _rounded(seconds and seconds * 1e6),
        "sm_clock_ghz": _rounded(of(_CLOCK) and of(_CLOCK) * 1e-9),
        "tflops": _rounded(seconds and problem.flops() / seconds * 1e-12),
        "flop_per_dram_byte": _rounded(moved and problem.flops() / moved),
        "dram_read_bytes": _whole(read),
        "dram_write_bytes": _whole(written),
        "dram_tb_per_s": _rounded(seconds and moved and moved / seconds * 1e-12),
        "l2_read_bytes": _whole(of(_FROM_L2)),
        "occupancy_theoretical": _share(of(_THEORETICAL)),
        "occupancy_achieved": _share(of(_ACHIEVED)),
        "occupancy_limiter": " and ".join(name for name, limit in limits.items() if limit == min(limits.values())),
        "blocks_per_sm": min(limits.values(), default=None),
        "waves": _rounded(of(_WAVES)),
        "registers": _whole(of(_REGISTERS)),
        "shared_bytes": None if None in shared else _whole(sum(shared)),
        "blocks": launch.grid[0] * launch.grid[1] * launch.grid[2],
        "threads": launch.block[0] * launch.block[1] * launch.block[2],
        **{f"{_word(name)}_busy": _share(of(metric)) for name, metric in _BUSY.items()},
    }


def _word(name: str) -> str:
    return name.lower().replace(" ", "_")


def _rounded(value: float | None) -> float | None:
    """To five digits: more are noise."""
    return None if value is None else float(f"{value:.5g}")


def _share(percent: float | None) -> float | None:
    return None if percent is None else _rounded(percent / 100)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def row(profile: Profile, version: Version) -> dict:
    """What results/profiles/<gpu>.json keeps of a GPU's profile."""
    return {
        "version": version.name,
        "kernel_hash": build.source_hash(version),
        **{name: getattr(profile.problem, name) for name in results.FIELDS},
        **profile.figures,
        "counters": profile.counters,
    }


@dataclass(frozen=True)
class Taken:
    """Profiles of several versions, and the labels of those whose kernel failed ("results": they could not be kept)."""

    profiles: list[Profile]
    failures: list[str]


def profile_all(
    names: Sequence[str],
    make_problem: Callable[[str], Problem],
    *,
    like: str | None = None,
    save: Path | None = None,
    keep: bool | None = None,
    say: Callable[[str], None] = print,
) -> Taken:
    """Profiles versions one after another.

    names         versions, their variants, paths of .cu files, and "all": every version that is one launch and takes
                  the problem
    make_problem  dtype → the problem, where nothing else decides its dtype; asked with each version's first
    keep          add a GPU's figures to results/profiles/<gpu>.json; None: if `all` was asked for
    say           is told of a kernel that fails, whereupon the others go on, and of what was kept

    Raises what `profile` does, but for a kernel's own failure, and ValueError for options that do not go together, all
    before anything is measured. After Ctrl-C what was measured is kept.
    """
    wanted = _wanted(names, make_problem, like)
    if save is not None and len(wanted) > 1:
        raise ValueError(f"--save {save}: a report is of one version; {len(wanted)} were asked for")
    if keep is None:
        keep = "all" in names and wanted[0][1].device == "cuda"
    where = {}
    if keep:
        _check_kept(wanted)
        where = results.environment()  # now: after one kernel's stray access CUDA may refuse this process everything
        results.check("profiles", where["name"])
    taken, failures = [], []
    try:
        with tqdm(wanted, leave=False, disable=None if len(wanted) > 1 else True) as bar:
            for version, problem in bar:
                bar.set_description(version.label)
                try:
                    taken.append((version, profile(version, problem, save=save)))
                except (build.BuildError, emulator.KernelFinding, nsight.NsightError) as error:
                    failures.append(version.label)
                    say(f"{version.label} was not profiled: {error}")
    finally:
        if keep and taken:
            try:
                rows = [row(each, version) for version, each in taken]
                say(f"kept in {results.append('profiles', rows, where=where)}")
            except (ValueError, OSError) as error:  # the profiles are shown all the same
                say(f"not kept: {error}")
                failures.append("results")
    return Taken([each for _, each in taken], failures)


def _wanted(names: Sequence[str], make_problem: Callable, like: str | None) -> list[tuple[Version, Problem]]:
    wanted = []
    for name in names:
        for version in VERSIONS if name == "all" else (find(name, like),):
            problem = make_problem(version.dtypes[0])
            if name != "all":
                compare.check_takes(version, problem)
            elif not version.fused or problem.dtype not in version.dtypes:
                continue
            wanted.append((version, problem))
    labels = [version.label for version, _ in wanted]
    if not labels:
        raise ValueError("nothing to profile: no version that is one launch takes the problem's dtype")
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice:
        raise ValueError(f"{twice} comes twice: every version is profiled once")
    return wanted


def _check_kept(wanted: Sequence[tuple[Version, Problem]]) -> None:
    for version, problem in wanted:
        if problem.device != "cuda":
            raise ValueError("--keep: what is kept are a GPU's figures, of --device cuda")
        if (version.own and not version.settings) or problem.stored:
            what = version.label if version.own else f"on tensors of {problem.source}"
            raise ValueError(f"--keep: kept are versions and their variants on random tensors, not {what}")


# ---------------------------------------------------------------------------------------------- reading figures


def compulsory_bytes(problem: Problem) -> tuple[int, int]:
    """Bytes that any fused kernel has to read (Q, K and V once) and to write (O and the log-sum-exp)."""
    size = getattr(torch, problem.dtype).itemsize
    queries = problem.batch * problem.heads * problem.queries
    keys = problem.batch * problem.kv_heads * problem.keys
    return (queries + 2 * keys) * problem.head_dim * size, queries * (problem.head_dim * size + 4)


def _measured_rows(profile: Profile) -> list[tuple[str, str, str]]:
    found, problem = profile.figures, profile.problem
    rows = (
        ("duration", "duration_us", "{:,.1f} µs".format, _duration_reading),
        ("arithmetic", "tflops", "{:.2f} TFLOP/s".format, _arithmetic_reading),
        ("arithmetic intensity", "flop_per_dram_byte", "{:,.0f} FLOP/byte".format, _intensity_reading),
        ("DRAM read", "dram_read_bytes", _bytes, _read_reading),
        ("DRAM written", "dram_write_bytes", _bytes, _write_reading),
        ("DRAM bandwidth", "dram_tb_per_s", "{:.3f} TB/s".format, _bandwidth_reading),
        ("L2 to the SMs", "l2_read_bytes", _bytes, _l2_reading),
        ("occupancy, theoretical", "occupancy_theoretical", lambda share: f"{100 * share:.1f} %", _theoretical_reading),
        ("occupancy, achieved", "occupancy_achieved", lambda share: f"{100 * share:.1f} %", _achieved_reading),
        ("registers", "registers", "{} a thread".format, _registers_reading),
        ("shared memory", "shared_bytes", "{:,} bytes a block".format, _shared_reading),
    )
    table = [
        (name, write(found[figure]), read(found, problem))
        for name, figure, write, read in rows
        if found[figure] is not None
    ]
    if busiest := _busiest(found):
        table.append(("busiest part", busiest, _busiest_reading(found)))
    if profile.warp_time:
        (file, line), share = max(profile.warp_time.items(), key=lambda item: item[1])
        where = f"{Path(file).name}:{line}" if file else "no known line"
        table.append(("slowest line", where, f"{_percent(share)} of the warps' time goes there, to work or to wait"))
    return table


def _bytes(number: float) -> str:
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= scale:
            return f"{number / scale:.4g} {unit}"
    return f"{number:.4g} bytes"


def _duration_reading(found: dict, problem: Problem) -> str:
    clock = "" if found["sm_clock_ghz"] is None else f"at {found['sm_clock_ghz']:.3g} GHz, "
    return f"{clock}one launch that finds the caches empty; `bench` has the median of many"


def _arithmetic_reading(found: dict, problem: Problem) -> str:
    part = "FP32 pipes" if problem.dtype == "float32" else "tensor cores"
    busy = found[f"{_word(part)}_busy"]
    return "" if busy is None else f"the {part} are at {_percent(busy)} of their peak"


def _intensity_reading(found: dict, problem: Problem) -> str:
    best = problem.flops() / sum(compulsory_bytes(problem))
    return f"Q, K, V and O moved once, no more, would give {best:,.0f}"


def _read_reading(found: dict, problem: Problem) -> str:
    times = found["dram_read_bytes"] / compulsory_bytes(problem)[0]
    if times <= 1.1:
        return f"{times:.2f}× the compulsory bytes: what is read again of K and V comes from L2"
    return f"{times:.2f}× the compulsory bytes: K and V come from DRAM more than once"


def _write_reading(found: dict, problem: Problem) -> str:
    times = found["dram_write_bytes"] / compulsory_bytes(problem)[1]
    if times < 0.9:
        return f"{times:.2f}× the compulsory bytes: the rest is in L2 when the kernel ends"
    if times <= 1.1:
        return f"{times:.2f}× the compulsory bytes: O is written once"
    return f"{times:.2f}× the compulsory bytes: O, or what stands for it, is written more than once"


def _bandwidth_reading(found: dict, problem: Problem) -> str:
    busy = found["dram_busy"]
    if busy is None:
        return ""
    return f"{_percent(busy)} of its peak: " + ("what limits" if busy >= NEAR_PEAK else "not what limits")


def _l2_reading(found: dict, problem: Problem) -> str:
    if not found["dram_read_bytes"]:
        return ""
    return f"{found['l2_read_bytes'] / found['dram_read_bytes']:,.1f}× what DRAM gave"


_ORDINALS = ["second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]


def _theoretical_reading(found: dict, problem: Problem) -> str:
    blocks, limiter = found["blocks_per_sm"], found["occupancy_limiter"]
    if not blocks:
        return ""
    fit = f"{blocks} block{'s' * (blocks > 1)} of {found['threads']} threads fit{'s' * (blocks == 1)} an SM"
    another = _ORDINALS[blocks - 1] if blocks <= len(_ORDINALS) else "more"
    if limiter == "blocks per SM":
        return f"{fit}; it takes no {another}, however small"
    several = limiter != "shared memory"  # registers, threads, or two things together
    return f"{fit}; {limiter} allow{'s' * (not several)} no {another}"


def _achieved_reading(found: dict, problem: Problem) -> str:
    theoretical, waves = found["occupancy_theoretical"], found["waves"]
    if waves is not None and waves < 1:
        return f"the grid's {found['blocks']:,} blocks take {_percent(waves)} of the places there are"
    if not theoretical:
        return ""
    share = found["occupancy_achieved"] / theoretical
    if share >= 0.9:
        return "the places are taken nearly all the time"
    rounds = "" if waves is None else f", with {waves:.3g} rounds of blocks"
    return f"{_percent(share)} of the places are taken{rounds}: some stay empty towards the end"


def _registers_reading(found: dict, problem: Problem) -> str:
    return f"{found['registers'] * found['threads']:,} a block, of the 65,536 of an SM"


def _shared_reading(found: dict, problem: Problem) -> str:
    return "and 1 KiB a block for the driver"


#: From this share of its peak on, a part of the chip is what a kernel waits for.
NEAR_PEAK = 0.6


def _busiest(found: dict) -> str | None:
    """The part of the chip that is nearest to its peak."""
    busy = {name: found[f"{_word(name)}_busy"] for name in _BUSY}
    known = {name: share for name, share in busy.items() if share is not None}
    return max(known, key=known.__getitem__, default=None)


def _busiest_reading(found: dict) -> str:
    share = found[f"{_word(_busiest(found))}_busy"]
    if share >= NEAR_PEAK:
        return f"at {_percent(share)} of its peak: what limits"
    return f"at {_percent(share)} of its peak, and nothing else is nearer: the warps wait, for data or for one another"


def _percent(share: float) -> str:
    """Two digits at least: 72 %, 3.1 %, 0.21 %."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


# ---------------------------------------------------------------------------------------------- reading the emulator


def _emulated_rows(profile: Profile) -> list[tuple[str, str, str]]:
    counters = profile.report.totals
    read, written = compulsory_bytes(profile.problem)
    rows = []
    for name, way, least, what in (("loads", "load", read, "Q, K and V"), ("stores", "store", written, "O")):
        sectors, asked = getattr(counters, f"global_{way}_sectors"), getattr(counters, f"global_{way}_bytes")
        if sectors:
            moved = 32 * sectors
            rows.append((f"global {name}", _bytes(moved), f"{moved / least:.3g}× {what} once; {_use(asked / moved)}"))
    for way in ("load", "store"):
        wavefronts = getattr(counters, f"shared_{way}_wavefronts")
        if wavefronts:
            rows.append((f"shared {way}s", f"{wavefronts:,} wavefronts", _conflicts(profile.report, way)))
    if counters.barriers:
        warps = sum(
            launch.blocks_total * -(-launch.block[0] * launch.block[1] * launch.block[2] // 32)
            for launch in profile.report.launches
        )
        each = counters.barriers / warps
        rows.append(
            ("barriers", f"{counters.barriers:,}", f"each of {warps:,} warps waits for its block {each:.4g} times")
        )
    return rows


def _use(share: float) -> str:
    """How much of the sectors that move is asked for; a word that several lanes read counts for each of them."""
    if share > 1.01:
        return "lanes share what comes, each byte on average " + f"{share:.3g} times"
    return "every byte of a sector is used" if share > 0.99 else f"{_percent(share)} of a sector's bytes are used"


def _conflicts(report: emulator.Report, way: str) -> str:
    totals = report.totals
    conflicts = getattr(totals, f"shared_{way}_conflicts")
    if not conflicts:
        return "no bank conflicts"
    worst = max(report.lines, key=lambda line: getattr(line.counters, f"shared_{way}_conflicts"))
    share = getattr(worst.counters, f"shared_{way}_conflicts") / conflicts
    ways = getattr(totals, f"shared_{way}_ways")
    return (
        f"bank conflicts make them {ways:.3g} times as many; {_percent(share)} of those at "
        f"{Path(worst.file).name}:{worst.line}"
    )


# ---------------------------------------------------------------------------------------------- showing

_HEADERS = ("", "", "what it says")


def describe(profiles: Profile | Sequence[Profile], fmt: str = "simple") -> str:
    """Profiles as text: "simple" for a terminal of 100 columns, "github" (Markdown) or "json"."""
    profiles = [profiles] if isinstance(profiles, Profile) else profiles
    if fmt == "json":
        return json.dumps([_data(each) for each in profiles], indent=2, ensure_ascii=False)
    return "\n\n".join(part for each in profiles for part in _parts(each, fmt))


def _parts(profile: Profile, fmt: str) -> list[str]:
    narrow = fmt == "simple"
    heading = f"{'' if narrow else '### '}{profile.version}: {profile.title}"
    widths = [None, None, 54] if narrow else None
    table = tabulate(profile.rows, _HEADERS, tablefmt=fmt, maxcolwidths=widths, disable_numparse=True)
    counters = emulator.Counters(**profile.counters)
    parts = [f"{heading}\n{profile.problem}" if narrow else f"{heading}\n\n{profile.problem}", table]
    if any(profile.counters.values()):
        parts.append(compare.counter_table(counters, fmt))
    lines = _worth_showing(profile)
    if profile.report is not None and not narrow:
        parts.append(profile.report.table(fmt))
    elif lines:
        table = compare.line_table(lines, profile.warp_time)
        parts.append(table if narrow else f"```\n{table}\n```")
    return [*parts, *(wrap(note) if narrow else note for note in profile.notes)]


def _worth_showing(profile: Profile) -> list[emulator.LineCounters]:
    """The lines that something is counted of, or that take time."""
    nothing, times = emulator.Counters(), profile.warp_time
    return [line for line in profile.lines if line.counters != nothing or times.get((line.file, line.line), 0) >= 0.01]


def _data(profile: Profile) -> dict:
    lines = [dataclasses.asdict(line) for line in profile.lines]
    for line in lines:
        line["warp_time"] = profile.warp_time.get((line["file"], line["line"]))
    return {
        "version": profile.version,
        "problem": profile.problem.options(),
        "figures": profile.figures or None,
        "readings": {name: reading for name, _, reading in profile.rows},
        "counters": profile.counters,
        "lines": lines,
        "notes": list(profile.notes),
    }
