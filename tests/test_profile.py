"""What ncu prints is read rightly, what goes wrong with it is said, and a profile's words follow from its figures.

`ncu` here is a program that prints stored tables; the last tests run the real one where there is a GPU for it."""

import collections
import dataclasses
import gzip
import json
import os
import pickle
import re
import sys
import weakref
from functools import partial
from pathlib import Path

import command
import pytest
import torch

import flash_tutorial
from flash_tutorial import build, clock, emulator, inspect, nsight, profile, registry, results
from flash_tutorial.problem import Problem
from flash_tutorial.versions import VERSIONS

DATA = Path(__file__).parent / "data"
RAW = (DATA / "ncu_raw.csv").read_text(encoding="utf-8")  # v04 on the problem below
INSTANCES = (DATA / "ncu_raw_instances.csv").read_text(encoding="utf-8")
SOURCE = (DATA / "ncu_source.csv").read_text(encoding="utf-8")
COUNTERS = nsight.needed(emulator.Counters.metrics().values())

THREE_LAUNCHES = """\
==PROF== Connected to process 41277 (/usr/bin/python3.12)
the program's own words, "with quotes", before
==PROF== Profiling "scores_kernel" - 0: 0%....50%....100% - 1 pass
==PROF== Disconnected from process 41277
"ID","Process ID","Kernel Name","Block Size","Grid Size","gpu__time_duration.sum","dram__bytes_read.sum","some.ratio"
"","","","","","us","Mbyte","%"
"0","41277","<unnamed>::scores_kernel(flash::Params)","(256, 1, 1)","(65,536, 1, 1)","1,234.50","1.5","7.25"
"1","41277","<unnamed>::softmax_kernel(flash::Params)","(256, 1, 1)","(32, 2, 1)","2.00","0","100"
"2","41277","<unnamed>::output_kernel(flash::Params)","(64, 2, 2)","(1, 1, 1)","3","2","n/a"
==PROF== a word after the table
"""


@pytest.fixture
def gpu(monkeypatch):
    """PyTorch says that there is a GPU, and no kernel needs to be built for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    monkeypatch.setattr(registry, "operator", lambda version, backend: None)
    monkeypatch.setattr(inspect, "machine_code", lambda version, arch: machine_code(version))


@pytest.fixture
def problem(gpu):
    return Problem(batch=4, heads=12, queries=2048, keys=2048, device="cuda")


#: Of the kernel in SOURCE: the offset of an instruction, it, and the line of v04 that it comes from.
CODE = (
    (0x00, "LDC R1, c[0x0][0x28]", 1),
    (0x20, "@P0 LDG.E.128.CONSTANT R8, desc[UR6][R8.64]", 10),
    (0x30, "STS.128 [R20], R8", 10),
    (0x40, "BAR.SYNC.DEFER_BLOCKING 0x0", 20),
    (0x50, "LDS.128 R4, [R2]", 30),
    (0x60, "FFMA R16, R4, R5, R16", 30),
    (0x70, "SHFL.BFLY PT, R3, R2, 0x10, 0x1f", 40),
    (0x80, "EXIT", 0),
)


def machine_code(version, *codes) -> list[tuple[inspect.Instruction, ...]]:
    """What inspect says of a version's kernels, which here is CODE after that of another."""
    file, codes = str(version.source), codes or ([], [*CODE[:4], (0x50, "FADD R1, R2, R3", 30)], CODE)
    return [
        tuple(inspect.Instruction(offset, text, file if line else "", line) for offset, text, line in code)
        for code in codes
    ]


class Ncu:
    """An `ncu` on the PATH that writes a report when it is told to watch a program, and prints tables for it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.prints(RAW, INSTANCES, SOURCE)
        self.says("==PROF== Disconnected from process 1")
        script = f"""#!{sys.executable}
import json, pathlib, sys
here, arguments = pathlib.Path({str(folder)!r}), sys.argv[1:]
with open(here / "calls", "a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
if "--import" in arguments:
    page = arguments[arguments.index("--page") + 1]
    print((here / ("instances" if "details" in arguments else page)).read_text())
    sys.exit(0)
words, status, writes, error = json.loads((here / "words").read_text())
print(words)
if writes:
    pathlib.Path(arguments[arguments.index("--export") + 1] + ".ncu-rep").write_text("a report")
if error:
    pathlib.Path(arguments[-1]).with_suffix(".error").write_text(error)
sys.exit(status)
"""
        (folder / "ncu").write_text(script)
        (folder / "ncu").chmod(0o755)

    tables = ("raw", "instances", "source")

    def prints(self, raw: str, instances: str, source: str = "") -> None:
        for name, text in zip(self.tables, (raw, instances, source), strict=True):
            (self.folder / name).write_text(text)

    def says(self, words: str, status: int = 0, report: bool = True, error: str = "") -> None:
        (self.folder / "words").write_text(json.dumps([words, status, report, error]))

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]


@pytest.fixture
def ncu(tmp_path, monkeypatch) -> Ncu:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return Ncu(folder)


call = partial(command.call, "profile")
refused = partial(command.refused, "profile")


# ---------------------------------------------------------------------------------------------- reading ncu


def test_a_table_among_other_lines():
    first, second, third = nsight.parse(THREE_LAUNCHES)
    assert [each["Kernel Name"].partition("(")[0] for each in (first, second, third)] == [
        "<unnamed>::scores_kernel",
        "<unnamed>::softmax_kernel",
        "<unnamed>::output_kernel",
    ]
    assert float(first["gpu__time_duration.sum"]) == 1_234_500  # nanoseconds
    assert float(first["dram__bytes_read.sum"]) == 1_500_000
    assert first["some.ratio"] == "7.25"


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("void <unnamed>::attention_kernel<(int)64>(flash::Params)", "attention_kernel<64>"),
        (
            "void (anonymous namespace)::attention_kernel<__half, (int)64>(flash::Params)",
            "attention_kernel<__half, 64>",
        ),
        ("void mine::kernel<(bool)1, (unsigned int)3, (bool)0>(float *, int)", "mine::kernel<true, 3, false>"),
        ("<unnamed>::scores_kernel(flash::Params)", "scores_kernel"),
        ("scores_kernel", "scores_kernel"),
    ],
)
def test_a_kernel_is_called_as_the_emulator_calls_it(printed, name):
    assert nsight.kernel_name(printed) == name


def test_no_table():
    with pytest.raises(nsight.NsightError, match="printed no table:\n.*No kernels were profiled"):
        nsight.parse("==WARNING== No kernels were profiled.")


def test_expressions():
    metrics = {"a.sum": 5.0, "b.sum": 3.0, "c[SHFL]": 1.0}
    assert nsight.evaluate("a.sum - b.sum + c[SHFL]", metrics) == 3
    assert nsight.needed(["a.sum - b.sum", "b.sum + c[SHFL]"]) == ["a.sum", "b.sum", "c[SHFL]"]
    with pytest.raises(KeyError, match="d.sum"):
        nsight.evaluate("a.sum + d.sum", metrics)


def test_every_counter_has_metrics_or_a_reason():
    for each in dataclasses.fields(emulator.Counters):
        metric, why_not = each.metadata["metric"], each.metadata["why_not"]
        assert bool(metric) != bool(why_not), each.name
        for name in nsight.needed([metric]) if metric else ():
            assert re.fullmatch(r"[a-z0-9]+__\w+(\.sum)?(\[[A-Z]+\])?", name), name


# ---------------------------------------------------------------------------------------------- measuring


def test_what_ncu_is_asked(ncu, problem):
    (launch,) = nsight.measure("v04", problem, ["gpu__time_duration.sum", *COUNTERS])
    assert (launch.kernel, launch.grid, launch.block) == ("attention_kernel<64>", (1536, 1, 1), (128, 1, 1))
    assert launch.metrics["gpu__time_duration.sum"] == 1_382_912
    assert launch.metrics["sass__inst_executed_per_opcode[SHFL]"] == 1_572_864
    assert launch.metrics["sass__inst_executed_per_opcode[VOTE]"] == 12  # printed as VOTE.ANY
    assert launch.metrics["sass__inst_executed_per_opcode[REDUX]"] == 0  # not printed: the kernel has none

    watch, raw, instances = ncu.calls
    metrics = watch[watch.index("--metrics") + 1].split(",")
    assert metrics.count("sass__inst_executed_per_opcode") == 1 and not any("[" in metric for metric in metrics)
    assert watch[watch.index("--clock-control") + 1] == "none"
    assert "--set" not in watch
    assert watch[-4:-1] == [sys.executable, "-m", "flash_tutorial.nsight"]
    assert raw[:1] == instances[:1] == ["--import"] and instances[-2:] == ["--print-metric-instances", "details"]


def pages(ncu) -> list[str]:
    """What was read of the report, one ncu for each."""
    return ["instances" if "details" in call else call[call.index("--page") + 1] for call in ncu.calls[1:]]


def test_instances_are_printed_only_for_opcodes(ncu, problem):
    nsight.measure("v04", problem, ["gpu__time_duration.sum"])
    assert pages(ncu) == ["raw"]


def test_opcodes_are_counted_from_the_instructions_where_these_are_known(ncu, problem):
    ncu.prints(RAW, "", SOURCE)
    metrics = [f"sass__inst_executed_per_opcode[{opcode}]" for opcode in ("LDS", "SHFL", "HMMA")]
    (launch,) = nsight.measure("v04", problem, metrics, by_instruction=True)
    assert pages(ncu) == ["raw", "source"]
    assert list(launch.metrics.values()) == [47_185_920 + 6_144, 1_572_864, 0]
    ncu.prints(*(text.replace("sass__inst", "sass__thread_inst") for text in (RAW, INSTANCES)), SOURCE)
    threads = "sass__thread_inst_executed_per_opcode[LDS]"
    (launch,) = nsight.measure("v04", problem, [threads], by_instruction=True)
    assert launch.metrics == {threads: 47_185_920}, "which has no @!PT LDS here"


def test_both_ways_to_count_opcodes_agree_on_an_h200(ncu, problem):
    ncu.prints(*h200_tables())
    (by_instruction,) = nsight.measure("v04", problem, COUNTERS, by_instruction=True)
    (by_opcode,) = nsight.measure("v04", problem, COUNTERS)
    assert by_instruction.metrics == by_opcode.metrics and not by_opcode.code


def test_what_the_watched_process_is_to_do(ncu, problem, monkeypatch):
    written = []
    run = nsight._run
    monkeypatch.setattr(nsight, "_run", lambda c: written.append(Path(c[-1])) or _unpickled(c, written) or run(c))
    nsight.measure("v04:pad=0", problem, ["gpu__time_duration.sum"])
    version, described = written[1]
    assert (version.name, described) == ("v04_vectorized:pad=0", problem)


def _unpickled(command, written):
    if "--export" in command:
        written.append(pickle.loads(written[0].read_bytes()))


def test_a_saved_report_has_all_sections(ncu, problem, tmp_path):
    nsight.measure("v04", problem, ["gpu__time_duration.sum"], save=tmp_path / "v04.ncu-rep")
    assert (tmp_path / "v04.ncu-rep").read_text() == "a report"
    watch = ncu.calls[0]
    assert watch[watch.index("--set") + 1] == "full"


def test_tables_are_kept_where_that_is_wanted(ncu, problem, tmp_path, monkeypatch):
    monkeypatch.setenv(nsight.KEEP, str(tmp_path / "kept"))
    for _ in range(2):
        nsight.measure("v04", problem, COUNTERS)
    names = {path.name for path in (tmp_path / "kept").iterdir()}
    stems = ("v04_vectorized-raw", "v04_vectorized-raw-print-metric-instances-details")
    assert names == {f"{stem}-{number}.csv" for stem in stems for number in (1, 2)}
    assert (tmp_path / "kept" / "v04_vectorized-raw-2.csv").read_text().strip() == RAW.strip()


def test_several_launches(ncu, problem):
    ncu.prints(THREE_LAUNCHES, THREE_LAUNCHES)
    launches = nsight.measure("v00", problem, ["gpu__time_duration.sum"])
    assert [each.kernel for each in launches] == ["scores_kernel", "softmax_kernel", "output_kernel"]
    assert [each.metrics["gpu__time_duration.sum"] for each in launches] == [1_234_500, 2000, 3000]
    assert [each.block for each in launches] == [(256, 1, 1), (256, 1, 1), (64, 2, 2)]


def test_counters_in_the_emulators_words(ncu, problem):
    found = nsight.counters("v04", problem)
    assert isinstance(found, emulator.Counters)
    assert (found.shuffles, found.barriers, found.votes) == (1_572_864, 208_896, 12)
    assert found.mma == 0  # 16,384 on the pipe, all of them HFMA2
    assert found.global_load_sectors == 51_904_512
    assert found.global_load_bytes == found.syncwarps == 0  # no metric


def h200_tables() -> list[str]:
    return [gzip.decompress((DATA / "ncu_h200" / f"{name}.csv.gz").read_bytes()).decode() for name in Ncu.tables]


def test_tables_that_an_h200_gave(ncu, problem):
    """What Nsight Compute 2025.3 printed of v04 on `problem`, against what v04's loops say: 4 warps and 48 · 32 · 32
    pairs of tiles, each with 16 steps of 12 loads in both products, 4 barriers, 2 reductions of 4 rows in 3 steps."""
    ncu.prints(*h200_tables())
    (launch,) = nsight.measure("v04", problem, COUNTERS, by_instruction=True)
    assert (launch.kernel, launch.grid, launch.block) == ("attention_kernel<64>", (48 * 32, 1, 1), (128, 1, 1))
    counted, warps = nsight.counted(launch), 4 * 48 * 32 * 32
    assert counted["shared_load_requests"] == warps * 2 * 16 * 12
    assert counted["shuffles"] == warps * 2 * 4 * 3
    assert counted["barriers"] == warps * 4
    assert counted["mma"] == counted["ldmatrix"] == counted["cp_async"] == 0

    opcodes = collections.Counter()
    for each in launch.code:
        opcodes[each.opcode] += each.warps
    assert opcodes["SHFL"] == counted["shuffles"] and opcodes["BAR"] == counted["barriers"]
    assert opcodes["FFMA"] > 0.6 * opcodes.total()


def test_counters_are_summed_over_launches(ncu, problem):
    header, units, row = RAW.splitlines()
    ncu.prints("\n".join([header, units, row, row]), "\n".join([*INSTANCES.splitlines(), INSTANCES.splitlines()[-1]]))
    assert nsight.counters("v04", problem).shuffles == 2 * 1_572_864


# ---------------------------------------------------------------------------------------------- what goes wrong


def test_no_ncu(problem, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", "/opt/mine")
    monkeypatch.setattr(nsight, "PLACES", ("/usr/local/nothing", "/opt/nothing"))
    message = refused("v04", "--device", "cuda")
    for told in ("PATH", "/opt/mine/bin", "/usr/local/nothing", "https://developer.nvidia.com/nsight-compute"):
        assert told in message


def test_the_newest_ncu_of_several(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    for release in ("2024.3.2", "2025.10.0", "2025.3.1"):
        (tmp_path / release).mkdir()
        (tmp_path / release / "ncu").touch(0o755)
    monkeypatch.setattr(nsight, "PLACES", ("/usr/local/nothing", str(tmp_path)))
    assert nsight.find_ncu() == str(tmp_path / "2025.10.0" / "ncu")


def test_no_permission(ncu, problem):
    ncu.says(
        "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on "
        "the target device 0.",
        status=1,
        report=False,
        error="AcceleratorError: CUDA error: unspecified launch failure",  # which is not the reason
    )
    message = refused("v04", "--device", "cuda")
    for told in (
        "sudo",
        "SYS_ADMIN",
        "NVreg_RestrictProfilingToAdminUsers=0",
        "https://developer.nvidia.com/ERR_NVGPUC",
    ):
        assert told in message
    with pytest.raises(PermissionError):
        nsight.measure("v04", problem, ["gpu__time_duration.sum"])


def test_an_unknown_metric(ncu, problem):
    ncu.says(r"==ERROR== Failed to find metric regex:^dram__nonsense_op\.(sum|min)", status=1, report=False)
    with pytest.raises(nsight.UnknownMetric, match="does not have dram__nonsense_op.sum on this GPU") as caught:
        nsight.measure("v04", problem, ["dram__nonsense.sum", "dram__nonsense_op.sum"])
    assert caught.value.metrics == ("dram__nonsense_op.sum",)


def test_a_metric_without_a_figure(ncu, problem):
    ncu.prints(THREE_LAUNCHES, THREE_LAUNCHES)
    for metric in ("some.ratio", "absent.sum"):
        with pytest.raises(nsight.UnknownMetric, match=metric):
            nsight.measure("v00", problem, [metric])


def test_all_that_has_no_figure_is_known_after_one_run(ncu, problem):
    ncu.prints(THREE_LAUNCHES, THREE_LAUNCHES)
    launches = nsight.measure_known("v00", problem, ["absent.sum", "dram__bytes_read.sum", "no.op[BAR]"])
    assert [each.metrics for each in launches] == [
        {"dram__bytes_read.sum": bytes} for bytes in (1_500_000, 0, 2_000_000)
    ]
    assert sum("--export" in call for call in ncu.calls) == 2


def test_the_calls_own_error_is_shown(ncu, problem):
    ncu.says("==ERROR== The application returned an error code (1).", 1, False, "OutOfMemoryError: 3 TB wanted")
    with pytest.raises(nsight.NsightError, match="v04_vectorized fails under ncu: OutOfMemoryError: 3 TB wanted"):
        nsight.measure("v04", problem, ["gpu__time_duration.sum"])


def test_any_other_error_of_ncu_is_shown(ncu, problem):
    ncu.says("==PROF== Connected\n==ERROR== Profiling failed because a driver resource was unavailable.", status=9)
    with pytest.raises(nsight.NsightError, match="exit status 9.*driver resource was unavailable"):
        nsight.measure("v04", problem, ["gpu__time_duration.sum"])


def test_nothing_was_launched(ncu, problem):
    ncu.says("==WARNING== No kernels were profiled.", report=False)
    with pytest.raises(nsight.NsightError, match="no kernel launch of v04_vectorized"):
        nsight.measure("v04", problem, ["gpu__time_duration.sum"])


def test_what_cannot_be_measured_is_refused_before_ncu_starts(problem):
    with pytest.raises(ValueError, match="device is 'cpu'"):
        nsight.measure("v04", Problem(), ["gpu__time_duration.sum"])
    with pytest.raises(ValueError, match="device is 'cpu'"):
        nsight.measure("v04", problem, ["gpu__time_duration.sum"], more=[Problem()])
    with pytest.raises(ValueError, match="ends in '.txt'"):
        nsight.measure("v04", problem, ["gpu__time_duration.sum"], save=Path("report.txt"))
    with pytest.raises(ValueError, match="there is no directory /nowhere"):
        nsight.measure("v04", problem, ["gpu__time_duration.sum"], save=Path("/nowhere/v04.ncu-rep"))


def test_a_kernel_that_does_not_compile_says_so(ncu, problem, monkeypatch):
    def broken(version, backend):
        raise build.BuildError("expected a ';'")

    monkeypatch.setattr(registry, "operator", broken)
    result = call("v04", "--device", "cuda")
    assert result.exit_code == 1 and "v04_vectorized was not profiled: expected a ';'" in result.stderr


# ---------------------------------------------------------------------------------------------- the watched process


@pytest.fixture
def events(monkeypatch):
    """What the watched process does, with the emulator for a GPU."""
    happened = []
    attention = flash_tutorial.ops.attention
    monkeypatch.setattr(flash_tutorial.ops, "attention", lambda *a, **k: happened.append("call") or attention(*a, **k))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("synchronize"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: happened.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: happened.append("stop"))
    return happened


def test_ncu_sees_the_second_call(events, tmp_path):
    told = tmp_path / "call"
    told.write_bytes(pickle.dumps((registry.resolve("v02"), Problem(queries=5, keys=7, head_dim=32))))
    nsight._watched(told)
    assert events == ["call", "synchronize", "start", "call", "synchronize", "stop"]


def test_several_problems_take_turns(events, tmp_path):
    told = tmp_path / "call"
    several = [Problem(queries=5, keys=keys, head_dim=32) for keys in (7, 9)]
    told.write_bytes(pickle.dumps((registry.resolve("v02"), *several)))
    nsight._watched(told)
    assert events == 2 * ["call", "synchronize", "start", "call", "synchronize", "stop"]


def test_the_watched_process_leaves_its_error(events, tmp_path):
    told = tmp_path / "call"
    told.write_bytes(pickle.dumps((registry.resolve("v02"), Problem(queries=5, keys=7, dtype="float16"))))
    with pytest.raises(SystemExit):
        nsight._watched(told)
    assert nsight._error_file(told).read_text().startswith("TypeError: q is float16: v02_fa2 accepts float32")
    assert events == ["call"]


# ---------------------------------------------------------------------------------------------- a GPU's figures


def test_figures(ncu, problem):
    found = profile.profile("v04", problem)
    figures = found.figures
    assert figures["duration_us"] == 1382.9
    assert figures["tflops"] == pytest.approx(4 * 4 * 12 * 2048**2 * 64 / 1.382912e-3 / 1e12, rel=1e-4)
    assert figures["flop_per_dram_byte"] == pytest.approx(problem.flops() / (77_824_512 + 1_310_720), rel=1e-4)
    assert figures["dram_tb_per_s"] == pytest.approx((77_824_512 + 1_310_720) / 1.382912e-3 / 1e12, rel=1e-4)
    assert (figures["dram_read_bytes"], figures["dram_write_bytes"]) == (77_824_512, 1_310_720)
    assert (figures["occupancy_theoretical"], figures["occupancy_achieved"]) == (0.1875, 0.1791)
    assert (figures["occupancy_limiter"], figures["blocks_per_sm"]) == ("registers", 3)
    assert (figures["registers"], figures["shared_bytes"]) == (158, 52_224)
    assert (figures["blocks"], figures["threads"]) == (1536, 128)
    assert found.counters["shuffles"] == 1_572_864


def readings(found) -> dict[str, str]:
    return {name: reading for name, _, reading in found.rows}


@pytest.fixture
def stored(ncu, problem):
    """v04's profile, with some figures set otherwise."""
    found = profile.profile("v04", problem)
    return lambda **others: dataclasses.replace(found, figures=found.figures | others)


def test_what_the_figures_say(stored):
    assert readings(stored()) == {
        "duration": "at 1.98 GHz, one launch that finds the caches empty; `bench` has the median of many",
        "arithmetic": "the FP32 pipes are at 72 % of their peak",
        "arithmetic intensity": "Q, K, V and O moved once, no more, would give 510",
        "DRAM read": "1.03× the compulsory bytes: what is read again of K and V comes from L2",
        "DRAM written": "0.05× the compulsory bytes: the rest is in L2 when the kernel ends",
        "DRAM bandwidth": "1.2 % of its peak: not what limits",
        "L2 to the SMs": "21.3× what DRAM gave",
        "occupancy, theoretical": "3 blocks of 128 threads fit an SM; registers allow no fourth",
        "occupancy, achieved": "the places are taken nearly all the time",
        "registers": "20,224 a block, of the 65,536 of an SM",
        "shared memory": "and 1 KiB a block for the driver",
        "busiest part": "at 81 % of its peak: what limits",
        "slowest line": "83 % of the warps' time goes there, to work or to wait",
    }


@pytest.mark.parametrize(
    ("name", "others", "reading"),
    [
        ("DRAM read", {"dram_read_bytes": 150_994_944}, "2.00× the compulsory bytes: K and V come from DRAM more"),
        ("DRAM written", {"dram_write_bytes": 25_559_040}, "1.00× the compulsory bytes: O is written once"),
        ("DRAM written", {"dram_write_bytes": 51_118_080}, "2.00× the compulsory bytes: O, or what stands for it"),
        ("DRAM bandwidth", {"dram_busy": 0.83}, "83 % of its peak: what limits"),
        ("DRAM bandwidth", {"dram_busy": None}, ""),
        (
            "occupancy, theoretical",
            {"blocks_per_sm": 1, "occupancy_limiter": "shared memory"},
            "1 block of 128 threads fits an SM; shared memory allows no second",
        ),
        (
            "occupancy, theoretical",
            {"occupancy_limiter": "registers and shared memory"},
            "3 blocks of 128 threads fit an SM; registers and shared memory allow no fourth",
        ),
        (
            "occupancy, theoretical",
            {"blocks_per_sm": 32, "threads": 32, "occupancy_limiter": "blocks per SM"},
            "32 blocks of 32 threads fit an SM; it takes no more, however small",
        ),
        ("occupancy, theoretical", {"blocks_per_sm": None}, ""),
        (
            "occupancy, achieved",
            {"waves": 0.121, "blocks": 48},
            "the grid's 48 blocks take 12 % of the places there are",
        ),
        (
            "occupancy, achieved",
            {"occupancy_achieved": 0.09375, "waves": 1.21},
            "50 % of the places are taken, with 1.21 rounds of blocks: some stay empty towards the end",
        ),
        (
            "busiest part",
            {"issue_slots_busy": 0.12, "fp32_pipes_busy": 0.05, "l1_and_shared_memory_busy": 0.31},
            "at 31 % of its peak, and nothing else is nearer: the warps wait, for data or for one another",
        ),
        ("arithmetic", {"fp32_pipes_busy": 0.0021}, "the FP32 pipes are at 0.21 % of their peak"),
        ("L2 to the SMs", {"dram_read_bytes": 0}, ""),
    ],
)
def test_other_figures_say_other_things(stored, name, others, reading):
    said = readings(stored(**others))[name]
    assert said.startswith(reading) and bool(said) == bool(reading)


def test_half_precision_is_held_against_the_tensor_cores(stored):
    found = stored(tensor_cores_busy=0.47)
    found = dataclasses.replace(found, problem=dataclasses.replace(found.problem, dtype="bfloat16"))
    assert readings(found)["arithmetic"] == "the tensor cores are at 47 % of their peak"


def test_the_part_that_is_busiest(stored):
    values = {name: value for name, value, _ in stored(l2_busy=0.93).rows}
    assert values["busiest part"] == "L2"


def test_compulsory_bytes():
    fp32 = Problem(batch=2, heads=4, kv_heads=2, queries=10, keys=20, head_dim=32)
    assert profile.compulsory_bytes(fp32) == ((2 * 4 * 10 + 2 * 2 * 2 * 20) * 32 * 4, 2 * 4 * 10 * (32 * 4 + 4))
    half = dataclasses.replace(fp32, dtype="float16")
    assert profile.compulsory_bytes(half) == ((2 * 4 * 10 + 2 * 2 * 2 * 20) * 32 * 2, 2 * 4 * 10 * (32 * 2 + 4))


def test_a_chip_that_lacks_a_metric_has_a_profile_without_it(ncu, problem, monkeypatch):
    measure = nsight.measure

    def on_another_chip(version, problem, metrics, **options):
        lacking = [each for each in metrics if "hfma2" in each or "fma.avg" in each]
        if lacking:
            raise nsight.UnknownMetric(lacking[:1])
        return measure(version, problem, metrics, **options)

    monkeypatch.setattr(nsight, "measure", on_another_chip)
    found = profile.profile("v04", problem)
    assert "mma" not in found.counters and "shuffles" in found.counters
    assert found.figures["fp32_pipes_busy"] is None
    assert readings(found)["arithmetic"] == ""
    assert "v04_vectorized" in profile.describe(found)


def test_every_figure_may_be_missing(ncu, problem):
    launch = nsight.Launch("attention_kernel<64>", (8, 2, 1), (128, 1, 1), {})
    figures = profile.figures(launch, problem)
    assert {name for name, value in figures.items() if value} == {"blocks", "threads"}
    found = profile.Profile("v04_vectorized", "Vectorized", problem, {}, figures=figures)
    assert found.rows == []
    assert "v04_vectorized" in profile.describe(found)


# ---------------------------------------------------------------------------------------------- by line


def test_instructions(ncu, problem):
    (launch,) = nsight.measure("v04", problem, ["gpu__time_duration.sum"], by_instruction=True)
    assert [each.offset for each in launch.code] == list(range(0, 160, 16))
    opcodes = ["LDC", "LDS", "LDG", "STS", "BAR", "LDS", "FFMA", "SHFL", "EXIT", "NOP"]
    assert [each.opcode for each in launch.code] == opcodes
    load, lds = launch.code[2], launch.code[5]
    assert (load.warps, load.sectors, load.samples) == (3_244_032, 51_904_512, 3188)
    assert load.counters == emulator.Counters(global_load_requests=3_244_032, global_load_sectors=51_904_512)
    assert lds.counters == emulator.Counters(
        shared_load_requests=47_185_920, shared_load_wavefronts=113_246_208, shared_load_conflicts=56_623_104
    )
    assert launch.code[6].counters == emulator.Counters()
    watch = ncu.calls[0]
    assert watch[watch.index("--section") + 1] == "SourceCounters"
    assert ncu.calls[-1][-4:] == ["--print-units", "base", "--print-source", "sass"]


@pytest.mark.parametrize(
    ("opcode", "counter"),
    [
        ("LDSM.16.M88.4 R8, [R4]", "ldmatrix"),
        ("STSM.16.M88.4 [R4], R8", "stmatrix"),
        ("@P1 LDGSTS.E.BYPASS.128 [R3], desc[UR4][R4.64]", "cp_async"),
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", "mma"),
        ("VOTE.ANY R2, PT, P0", "votes"),
        ("REDUX.SUM UR4, R2", "votes"),
        ("BAR.ARV 0x1, 0x80", "barriers"),
        ("WARPSYNC 0xffffffff", "syncwarps"),
        ("ATOMS.ADD R2, [R3], R4", "atomics"),
        ("RED.E.ADD.STRONG.GPU desc[UR4][R2.64], R5;", "atomics"),
    ],
)
def test_what_an_instruction_counts_as(opcode, counter):
    assert getattr(nsight.Executed(0, opcode, 7, 0, 4, 2, 1).counters, counter) == 7


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "instructions for 0 of 1 launches"),
        (
            SOURCE.replace("L1 Wavefronts Shared Excessive", "Something"),
            "has no L1 Wavefronts Shared Excessive; it has",
        ),
    ],
)
def test_a_table_of_instructions_that_cannot_be_read_is_no_loss_of_the_rest(ncu, problem, source, reason):
    ncu.prints(RAW, INSTANCES, source)
    with pytest.warns(UserWarning, match=reason):
        found = profile.profile("v04", problem)
    assert found.counters["votes"] == 12, "by opcode"
    assert found.lines == [] and found.figures["registers"] == 158
    assert "Figures by line of source are not known: ncu told of no instructions." in profile.describe(found)


def test_figures_by_line(ncu, problem):
    found = profile.profile("v04", problem)
    source = registry.resolve("v04").source
    assert [(Path(line.file), line.line) for line in found.lines] == [(source, line) for line in (1, 10, 20, 30, 40)]
    assert found.lines[1].text == source.read_text().splitlines()[9].strip()
    copy = found.lines[1].counters  # two instructions
    assert (copy.global_load_requests, copy.shared_store_wavefronts) == (3_244_032, 13_074_432)
    assert sum(found.warp_time.values()) == pytest.approx(1)
    values = {name: value for name, value, _ in found.rows}
    assert values["slowest line"] == "v04_vectorized.cu:30"
    assert found.notes == ()


@pytest.mark.parametrize(
    "code",
    [
        [*CODE[:4], (0x50, "FADD R1, R2, R3", 30)],
        [*CODE, (0xA0, "FADD R1, R2, R3", 30)],
        [],
    ],
)
def test_other_machine_code_is_not_taken_for_what_ran(ncu, problem, monkeypatch, code):
    monkeypatch.setattr(inspect, "machine_code", lambda version, arch: machine_code(version, code, code))
    found = profile.profile("v04", problem)
    assert found.lines == [] and found.warp_time == {} and "other machine code" in found.notes[0]


def test_a_kernel_is_known_by_its_code_whatever_ncu_calls_it(ncu, problem):
    """What a tables's names lack of a shape's namespace, or have of blanks, does not matter."""
    name = "void <unnamed>::attention_kernel<__nv_bfloat16, 128, Shape<64, 64, 4, 2>>(Params)"
    ncu.prints(*(text.replace("void <unnamed>::attention_kernel<(int)64>(flash::Params)", name) for text in
                 (RAW, INSTANCES, SOURCE)))  # fmt: skip
    found = profile.profile("v04", problem)
    assert found.notes == () and [line.line for line in found.lines] == [1, 10, 20, 30, 40]


def test_a_machine_that_cannot_inspect_has_no_lines(ncu, problem, monkeypatch):
    def refuse(*arguments, **options):
        raise ValueError("there is no nvcc")

    monkeypatch.setattr(inspect, "machine_code", refuse)
    found = profile.profile("v04", problem)
    assert found.lines == [] and found.notes == ("Figures by line of source are not known: there is no nvcc",)


# ---------------------------------------------------------------------------------------------- long launches


class Timed:
    """A GPU whose calls of attention take `seconds`; what was made of its memory is in `events`."""

    def __init__(self):
        self.seconds, self.now, self.calls = 1e-3, 0.0, 0
        self.tensors: list[weakref.ref] = []
        self.held: list[int] = []  # tensors that were alive when the cache was emptied

    def attention(self, q, k, v, **options):
        self.calls += 1
        self.now += self.seconds
        if self.seconds == float("inf"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return q

    def captured(self, function, pool=None):
        function()
        self.now -= self.seconds  # a graph's calls are launched when it is replayed
        return function

    def make(self):
        made = torch.zeros(3, 1, 1, 1, 1).unbind()
        self.tensors = [weakref.ref(tensor) for tensor in made]
        return made

    def empty_cache(self):
        self.held.append(sum(tensor() is not None for tensor in self.tensors))
        if self.seconds == float("inf"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def timed(ncu, gpu, monkeypatch):
    timed = Timed()
    monkeypatch.setattr(profile.ops, "attention", timed.attention)
    monkeypatch.setattr(Problem, "tensors", lambda problem: timed.make())
    monkeypatch.setattr(torch.cuda, "empty_cache", timed.empty_cache)
    monkeypatch.setattr(clock, "_captured", timed.captured)
    monkeypatch.setattr(clock, "_synchronize", lambda: None)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: timed.now)
    monkeypatch.setitem(sys.modules, "triton", None)  # which is not needed
    return timed


def test_a_long_launch_is_not_looked_at_by_instruction(ncu, timed, monkeypatch):
    monkeypatch.setattr(inspect, "machine_code", lambda *a: pytest.fail("nothing is to be looked up"))
    timed.seconds = 0.2433
    result = call("v04", "--device", "cuda", "--format", "json")
    (entry,) = json.loads(result.stdout)
    assert "SourceCounters" not in ncu.calls[0] and pages(ncu) == ["raw", "instances"]
    assert entry["notes"] == [
        "Figures by line of source are not measured: one launch takes 243 ms; a smaller problem has them."
    ]
    assert entry["lines"] == [] and entry["counters"]["shuffles"] == 1_572_864 and entry["counters"]["votes"] == 12
    assert timed.calls == 3, "one to load the kernel, one to capture it and one that is timed"
    assert "243 ms" in call("v04", "--device", "cuda").stdout


@pytest.mark.parametrize("seconds", [1e-4, 0.019])
def test_a_short_one_is(ncu, timed, problem, seconds):
    timed.seconds = seconds
    found = profile.profile("v04", problem)
    assert "SourceCounters" in ncu.calls[0] and found.lines and found.notes == ()
    assert timed.calls == 2 + clock.WARMUP


def test_the_watched_process_has_the_memory_to_itself(timed, problem):
    profile.profile("v04", problem)
    assert timed.held == [0] and len(timed.tensors) == 3


def test_a_kernel_that_fails_while_it_is_timed_is_left_to_ncu(ncu, timed, problem):
    timed.seconds = float("inf")
    assert profile.profile("v04", problem).lines, "it fails here only"
    ncu.says("==ERROR== The application returned an error code (1).", 1, False, "AcceleratorError: a stray access")
    result = call("v04", "--device", "cuda")
    assert result.exit_code == 1 and "v04_vectorized fails under ncu: AcceleratorError: a stray access" in result.stderr


def test_a_saved_report_has_all_of_a_long_launch(ncu, timed, problem, tmp_path):
    timed.seconds = 10.0
    found = profile.profile("v04", problem, save=tmp_path / "v04.ncu-rep")
    assert found.lines and found.notes == () and timed.calls == 0


def test_nothing_is_timed_that_cannot_be_measured(timed, problem, monkeypatch):
    def broken(version, backend):
        raise build.BuildError("expected a ';'")

    monkeypatch.setattr(registry, "operator", broken)
    with pytest.raises(build.BuildError):
        profile.profile("v04", problem)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(nsight, "PLACES", ("/usr/local/nothing", "/opt/nothing"))
    with pytest.raises(FileNotFoundError):
        profile.profile("v04", problem)
    assert timed.calls == 0


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["v00"], "v00_naive launches several kernels: a profile is of one launch"),
        (["v00", "--device", "cuda"], "v00_naive launches several kernels"),
        (["sdpa_flash"], "sdpa_flash is PyTorch's and launches kernels of its own"),
        (["baseline"], "baseline is PyTorch's"),
        (["v03", "v03_warp_local"], "v03_warp_local comes twice"),
        (["v3x"], "unknown version 'v3x'"),
        (["v04:pad=3"], "v04_vectorized:pad is '3'"),
        (["./none_v03.cu"], "there is no kernel file"),
        (["v03", "--dtype", "float16"], "v03_warp_local takes float32"),
        (["v03", "--head-dim", "129"], "head_dim is 129"),
        (["v04", "--device", "cuda", "--head-dim", "48"], "head_dim is 48: PyTorch's kernels pad it"),
        (["v03", "--keep"], "--keep: what is kept are a GPU's figures"),
        (["v03", "--save", "v03.ncu-rep"], "--device cuda"),
        (["v03", "v04", "--device", "cuda", "--save", "v03.ncu-rep"], "a report is of one version; 2 were asked for"),
        (["v03", "--device", "cuda", "--save", "v03.txt"], "v03.txt ends in '.txt': a report's name ends in .ncu-rep"),
    ],
)
def test_refusals(gpu, ncu, arguments, message):
    assert message in refused(*arguments)


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no CUDA GPU: use cpu (the emulator)" in refused("v04", "--device", "cuda")


def test_a_version_turns_out_to_launch_several_kernels(ncu, problem):
    header, units, row = RAW.splitlines()
    instances = INSTANCES.splitlines()
    ncu.prints("\n".join([header, units, row, row]), "\n".join([*instances, instances[-1]]), SOURCE * 2)
    assert "v04_vectorized launches 2 kernels (attention_kernel<64>, attention_kernel<64>)" in refused(
        "v04", "--device", "cuda"
    )


def test_what_is_not_random_or_not_a_version_is_not_kept(gpu, ncu, tmp_path):
    own = tmp_path / "my_v03.cu"
    own.write_text(registry.resolve("v03").source.read_text())
    assert "not my_v03.cu" in refused(own, "--device", "cuda", "--keep")
    file = DATA / "minilm_qkv.safetensors"
    message = refused("v03", "--device", "cuda", "--keep", "--input", file, "--prefix", "layer0")
    assert "not on tensors of minilm_qkv.safetensors, layer0" in message


# ---------------------------------------------------------------------------------------------- the command on a GPU


def test_the_table_of_a_gpu(gpu, ncu):
    result = call("v04", "--device", "cuda")
    assert result.exit_code == 0
    assert "B=4 Hq=12 Hkv=12 M=2048 N=2048 D=64 float32" in result.stdout
    assert re.search(
        r"occupancy, theoretical +18.8 % +3 blocks of 128 threads fit an SM; registers allow", result.stdout
    )
    assert re.search(r"shuffles +1,572,864", result.stdout)
    assert re.search(r"^ +10 .* 16 +13.07M +9.741$", result.stdout, re.MULTILINE)  # a line with LDG and STS
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_markdown_and_json_of_a_gpu(gpu, ncu):
    markdown = call("v04", "--device", "cuda", "--format", "github").stdout
    assert "| DRAM read " in markdown and markdown.count("```") == 2
    (entry,) = json.loads(call("v04", "--device", "cuda", "--format", "json", "--queries", 512).stdout)
    assert entry["problem"]["queries"] == 512 and entry["problem"]["keys"] == 2048
    assert entry["figures"]["duration_us"] == 1382.9
    assert entry["counters"]["barriers"] == 208_896
    assert [line["line"] for line in entry["lines"]] == [1, 10, 20, 30, 40]
    assert entry["lines"][3]["counters"]["shared_load_wavefronts"] == 113_246_208
    assert entry["lines"][3]["warp_time"] == pytest.approx((9001 + 30211) / 47140)
    assert entry["notes"] == []
    assert entry["readings"]["busiest part"] == "at 81 % of its peak: what limits"


ENVIRONMENT = {"name": "NVIDIA H200", "driver_version": "580.1"}


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Where results go, instead of the repository's own."""
    folder = tmp_path / "results"
    monkeypatch.setattr(results, "RESULTS", folder)
    monkeypatch.setattr(results, "environment", lambda: ENVIRONMENT)
    return folder / "profiles" / "h200.json"


def test_all_is_kept(gpu, ncu, kept):
    result = call("all", "--device", "cuda", "--dtype", "float32")
    assert result.exit_code == 0 and f"kept in {kept}" in result.stderr
    (run,) = json.loads(kept.read_text())["runs"]
    names = [each.name for each in VERSIONS if each.fused and "float32" in each.dtypes]
    assert [row["version"] for row in run["rows"]] == names
    row = run["rows"][-1]
    assert row["kernel_hash"] == build.source_hash(registry.resolve(row["version"]))
    problem = {"batch": 4, "heads": 12, "kv_heads": 12, "queries": 2048, "keys": 2048, "head_dim": 64}
    assert problem.items() <= row.items() and (row["dtype"], row["causal"]) == ("float32", False)
    assert (row["duration_us"], row["dram_read_bytes"], row["registers"]) == (1382.9, 77_824_512, 158)
    assert row["counters"]["shuffles"] == 1_572_864


def test_all_takes_each_version_in_its_own_dtype(gpu, ncu, kept):
    call("all", "--device", "cuda")
    (run,) = json.loads(kept.read_text())["runs"]
    assert [(row["version"], row["dtype"]) for row in run["rows"]] == [
        (each.name, each.dtypes[0]) for each in VERSIONS if each.fused
    ]


def test_one_version_is_kept_if_that_is_asked_for(gpu, ncu, kept):
    call("v04:pad=0", "--device", "cuda")
    assert not kept.exists()
    call("v04:pad=0", "--device", "cuda", "--keep")
    call("all", "--device", "cuda", "--no-keep")
    (run,) = json.loads(kept.read_text())["runs"]
    assert [row["version"] for row in run["rows"]] == ["v04_vectorized:pad=0"]


def test_a_damaged_results_file_is_found_before_anything_is_measured(gpu, ncu, kept):
    kept.parent.mkdir(parents=True)
    kept.write_text("{")
    assert "is damaged" in refused("all", "--device", "cuda")
    assert not (ncu.folder / "calls").exists()
    assert kept.read_text() == "{"


def test_a_gpu_that_a_kernel_has_brought_down_is_not_asked_again(gpu, ncu, kept, monkeypatch):
    asked = []
    monkeypatch.setattr(
        results, "environment", lambda: asked.append(len(list(ncu.folder.glob("calls")))) or ENVIRONMENT
    )
    call("v02", "--device", "cuda", "--keep")
    assert asked == [0] and len(json.loads(kept.read_text())["runs"]) == 1


def test_what_cannot_be_kept_in_the_end_is_shown(gpu, ncu, kept, monkeypatch):
    def full_disk(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr(results.files, "write", full_disk)
    result = call("v02", "v04", "--device", "cuda", "--keep")
    assert result.exit_code == 1 and "not kept: no space left" in result.stderr
    assert "v02_fa2: " in result.stdout and "v04_vectorized: " in result.stdout


def _failing(monkeypatch, name, error):
    measure = nsight.measure

    def measuring(version, *arguments, **options):
        if version.name == name:
            raise error
        return measure(version, *arguments, **options)

    monkeypatch.setattr(nsight, "measure", measuring)


def test_one_that_fails_does_not_keep_the_others_from_being_profiled(gpu, ncu, kept, monkeypatch):
    _failing(monkeypatch, "v03_warp_local", nsight.NsightError("an illegal memory access"))
    result = call("v02", "v03", "v04", "--device", "cuda", "--keep")
    assert result.exit_code == 1
    assert "v03_warp_local was not profiled: an illegal memory access" in result.stderr
    assert "v02_fa2: " in result.stdout and "v04_vectorized: " in result.stdout
    (run,) = json.loads(kept.read_text())["runs"]
    assert [row["version"] for row in run["rows"]] == ["v02_fa2", "v04_vectorized"]


def test_what_was_measured_before_an_interruption_is_kept(gpu, ncu, kept, monkeypatch):
    _failing(monkeypatch, "v04_vectorized", KeyboardInterrupt())
    assert call("v02", "v04", "--device", "cuda", "--keep").exit_code != 0
    (run,) = json.loads(kept.read_text())["runs"]
    assert [row["version"] for row in run["rows"]] == ["v02_fa2"]


# ---------------------------------------------------------------------------------------------- the emulator's side


SMALL = ("--queries", 20, "--keys", 33, "--head-dim", 32)


def test_the_emulators_profile():
    found = profile.profile("v02", Problem(queries=20, keys=33, head_dim=32))
    totals = found.report.totals
    assert found.counters == dataclasses.asdict(totals)
    assert found.figures == {}
    moved, least = 32 * totals.global_load_sectors, profile.compulsory_bytes(found.problem)[0]
    said = readings(found)
    assert said["global loads"].startswith(f"{moved / least:.3g}× Q, K and V once")
    worst = max(found.report.lines, key=lambda line: line.counters.shared_load_conflicts)
    assert said["shared loads"].startswith(f"bank conflicts make them {totals.shared_load_ways:.3g} times as many")
    assert said["shared loads"].endswith(f"at v02_fa2.cu:{worst.line}")


def test_no_conflicts_are_said_to_be_none():
    found = profile.profile("v04", Problem(queries=20, keys=33, head_dim=32))
    assert readings(found)["shared loads"] == "no bank conflicts"


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (1.0, "every byte of a sector is used"),
        (0.5, "50 % of a sector's bytes are used"),
        (8.0, "lanes share what comes, each byte on average 8 times"),
    ],
)
def test_how_much_of_a_sector_is_used(share, said):
    assert profile._use(share) == said


def test_the_command_on_a_cpu():
    result = call("v03", "v04:pad=0", *SMALL)
    assert result.exit_code == 0
    assert result.stdout.index("v03_warp_local: ") < result.stdout.index("v04_vectorized:pad=0: ")
    assert "global load requests" in result.stdout and "__syncthreads();" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_json_on_a_cpu():
    (entry,) = json.loads(call("v03", *SMALL, "--format", "json").stdout)
    assert entry["figures"] is None
    assert sum(line["counters"]["shuffles"] for line in entry["lines"]) == entry["counters"]["shuffles"] > 0
    assert set(entry["readings"]) == {"global loads", "global stores", "shared loads", "shared stores", "barriers"}


def test_all_on_a_cpu():
    entries = json.loads(call("all", "--dtype", "float32", *SMALL, "--format", "json").stdout)
    assert [each["version"] for each in entries] == [
        each.name for each in VERSIONS if each.fused and "float32" in each.dtypes
    ]


def test_an_own_kernel_with_a_race(tmp_path):
    own = tmp_path / "my_v02.cu"
    text = registry.resolve("v02").source.read_text()
    own.write_text(re.sub(r"__syncthreads\(\);  // S is whole.*", "", text))
    result = call(own, *SMALL)
    assert result.exit_code == 1 and result.stdout == ""
    assert "my_v02.cu was not profiled: data race" in result.stderr


# ---------------------------------------------------------------------------------------------- with a real GPU


def _ncu_here() -> bool:
    try:
        return torch.cuda.is_available() and bool(nsight.find_ncu())
    except FileNotFoundError:
        return False


needs_ncu = pytest.mark.skipif(not _ncu_here(), reason="there is no GPU, or no ncu")


@needs_ncu
def test_counters_of_a_gpu_equal_the_emulators():
    on_cpu = Problem(queries=128, keys=128)
    emulated = profile.profile("v04", on_cpu).counters
    counted = dataclasses.asdict(nsight.counters("v04", dataclasses.replace(on_cpu, device="cuda")))
    for name in ("shuffles", "barriers", "global_store_requests", "shared_load_wavefronts", "shared_load_conflicts"):
        assert counted[name] == emulated[name], name


@needs_ncu
def test_a_profile_of_a_gpu(tmp_path):
    found = profile.profile("v04", Problem(queries=256, keys=256, device="cuda"), save=tmp_path / "v04.ncu-rep")
    assert (tmp_path / "v04.ncu-rep").stat().st_size > 0
    assert found.figures["duration_us"] > 0 and found.figures["registers"] > 0
    assert 0 < found.figures["occupancy_achieved"] <= 1
    assert found.figures["dram_read_bytes"] >= 0.5 * profile.compulsory_bytes(found.problem)[0]
    assert found.notes == () and sum(line.counters.shuffles for line in found.lines) == found.counters["shuffles"]
