"""The emulator beside a GPU: the stored table holds, and what measures and explains it does so rightly.

No test here needs a GPU: Nsight Compute is a fake that counts what it is told to.
"""

import dataclasses
import json
import re
from functools import partial
from pathlib import Path

import command
import numpy as np
import pytest
import torch

from flash_tutorial import build, emulator, hardware, inspect, nsight, registry, results

ROOT = Path(__file__).resolve().parents[1]
COUNTERS = emulator.Counters.metrics()


def row(version="v04_vectorized", keys=512, dtype="float32", emulated=None, counted=None, **more):
    """A row as it is stored, 100 of everything but where told otherwise."""
    figures = dict.fromkeys(COUNTERS, 100)
    return {
        "version": version,
        "kernel_hash": "0123456789",
        "batch": 1, "heads": 2, "kv_heads": 2, "queries": 512, "keys": keys, "head_dim": 64,
        "dtype": dtype, "causal": False,
        "emulator": figures | (emulated or {}),
        "hardware": figures | (emulated or {}) | (counted or {}),
        "reasons": {},
    } | more  # fmt: skip


call = partial(command.call, "hardware")


# ---------------------------------------------------------------------------------------------- the stored table

STORED = hardware.stored()
CURRENT = [row for row in STORED if not row["stale"]]
needs_table = pytest.mark.skipif(not STORED, reason="no table is stored: `flash-tutorial hardware` measures one")


@needs_table
def test_every_stored_difference_is_explained():
    assert hardware.unexplained(STORED) == []


@needs_table
def test_most_of_what_is_stored_is_equal():
    """So that explanations do not become the rule."""
    compared = [(each, name) for each in STORED for name in hardware.counters([each])]
    equal = [(each, name) for each, name in compared if hardware.share(each, name) == 0]
    assert len(equal) >= 0.9 * len(compared)


@needs_table
@pytest.mark.parametrize("known", hardware.KNOWN, ids=lambda known: known.counters[0])
def test_every_declared_reason_is_needed(known):
    assert any(known.explains(each, name) for each in STORED for name in hardware.differing(each))


@needs_table
@pytest.mark.parametrize("stored", CURRENT, ids=lambda row: f"{row['version']}-{row['keys']}-{row['head_dim']}")
def test_the_emulator_still_counts_what_is_stored(stored):
    calls = hardware.calls([stored["version"]])
    (problem,) = (problem for _, problem in calls if all(getattr(problem, f) == stored[f] for f in hardware.FIELDS))
    report = hardware.emulate(registry.resolve(stored["version"]), problem)
    assert hardware.comparable(report.totals) == stored["emulator"]


# ---------------------------------------------------------------------------------------------- measuring


METRICS = nsight.needed(COUNTERS.values())


class Gpu:
    """Counts what the emulator does, and `more` of some counters."""

    def __init__(self):
        self.more = {"global_store_requests": 1}
        self.unknown = ()  # metrics, without opcodes
        self.calls = []

    def measure(self, version, problem, metrics, *, more):
        if unknown := {each.partition("[")[0] for each in metrics} & set(self.unknown):
            raise nsight.UnknownMetric(unknown)
        self.calls.append((version.label, len(more) + 1))
        return [self.launch(version, each, metrics) for each in (problem, *more)]

    def launch(self, version, problem, metrics):
        assert problem.device == "cuda"
        (launch,) = hardware.emulate(version, dataclasses.replace(problem, device="cpu")).launches
        figures = {name: getattr(launch.counters, name) + self.more.get(name, 0) for name in COUNTERS}
        figures["shared_load_requests"] -= figures["ldmatrix"]  # what its first term adds to its second, ldmatrix
        found = {nsight.needed([metric])[0]: figures[name] for name, metric in COUNTERS.items()}
        return nsight.Launch(launch.kernel, launch.grid, launch.block, {m: found.get(m, 0) for m in metrics})


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with a GPU that has one store instruction more than the emulator; results go to `tmp_path`."""
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(nsight, "find_ncu", lambda: "ncu")
    monkeypatch.setattr(nsight, "measure", gpu.measure)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "environment", lambda: {"name": "NVIDIA Test"})
    opcodes = (inspect.Instruction(0, opcode, "", 0) for opcode in ("STG.E.64 [R2], R4", "STG.E [R2], R3"))
    kernel = inspect.Kernel("k", "k", 32, 0, 0, 0, 0, sass=tuple(opcodes))
    found = inspect.Inspection("v", "sm_90", 64, "float32", (kernel,), ())
    monkeypatch.setattr(inspect, "inspect", lambda *arguments, **options: found)
    monkeypatch.setattr(hardware, "PROBLEMS", ({"queries": 16, "keys": 20, "head_dim": 32, "causal": True},))
    return gpu


def test_a_run_is_shown_and_kept(gpu, tmp_path):
    result = call("v04", "v03")
    assert result.exit_code == 1  # one store more: nothing explains it
    assert "B=1 Hq=2 Hkv=2 M=16 N=20 D=32 causal" in result.stdout and "?: nothing explains this" in result.stdout
    assert f"{tmp_path / 'counters' / 'test.json'}: 2 rows" in result.stderr
    first, second = hardware.stored()
    assert (first["version"], second["version"]) == ("v04_vectorized", "v03_warp_local")
    assert (first["gpu"], first["stale"], first["keys"]) == ("NVIDIA Test", False, 20)
    stores = first["emulator"]["global_store_requests"]
    assert first["hardware"] == first["emulator"] | {"global_store_requests": stores + 1}
    assert first["emulator"]["barriers"] == 2 * 4 * 4  # heads, warps and, for the one tile of keys, barriers
    shown = call("--stored", "v03")
    assert shown.exit_code == 1 and "v03_warp_local" in shown.stdout and "v04_vectorized" not in shown.stdout
    assert "not measured on a GPU yet: v02_fa2\n" in call("--stored", "v02").stderr


def test_what_cannot_be_kept_in_the_end_is_shown(gpu, monkeypatch):
    def full_disk(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr(results.files, "write", full_disk)
    result = call("v03")
    assert "not kept: no space left" in result.stderr and "v03_warp_local" in result.stdout


def test_nothing_stored_is_no_agreement(gpu):
    result = call("--stored", "v02")
    assert (result.exit_code, result.stdout) == (1, "") and "nothing of this is stored" in result.stderr


def test_what_agrees_is_right(gpu):
    gpu.more = {}
    result = call("v04", "v03", "--no-keep")
    assert result.exit_code == 0 and "→" not in result.stdout.partition("\n")[2]


def test_a_versions_problems_share_a_process(gpu, monkeypatch):
    monkeypatch.setattr(hardware, "PROBLEMS", ({"keys": 16, "head_dim": 32}, {"keys": 40, "head_dim": 32}))
    rows = hardware.measure(hardware.calls(["v03", "v04"]), keep=False)
    assert gpu.calls == [("v03_warp_local", 2), ("v04_vectorized", 2)]
    assert [(row["version"][:3], row["keys"]) for row in rows] == [("v03", 16), ("v03", 40), ("v04", 16), ("v04", 40)]
    assert all(hardware.differing(row) == ["global_store_requests"] for row in rows)


def test_a_version_of_several_launches_is_summed(gpu, monkeypatch):
    def measure(version, problem, metrics, *, more):
        assert version.name == "v00_naive" and not more
        launches = hardware.emulate(version, dataclasses.replace(problem, device="cpu")).launches
        found = [{**dict.fromkeys(metrics, 0), METRICS[0]: each.counters.global_load_requests} for each in launches]
        return [nsight.Launch(each.kernel, each.grid, each.block, f) for each, f in zip(launches, found, strict=True)]

    monkeypatch.setattr(nsight, "measure", measure)
    (found,) = hardware.measure(hardware.calls(["v00"]), keep=False)
    assert found["hardware"]["global_load_requests"] == found["emulator"]["global_load_requests"] > 0


def test_a_metric_that_the_gpu_lacks_leaves_its_counter_out(gpu):
    gpu.unknown = ("sm__inst_executed_pipe_tensor_op_hmma_type_hfma2.sum", "sass__inst_executed_per_opcode")
    (found,) = hardware.measure(hardware.calls(["v05"]), keep=False)
    assert {"mma", "barriers", "shuffles"} <= COUNTERS.keys() - found["hardware"].keys()
    assert found["emulator"]["mma"] > 0 and "mma" not in hardware.differing(found)
    assert "–" in hardware.describe([found])


def test_another_number_of_launches_is_no_measurement(gpu, monkeypatch):
    monkeypatch.setattr(nsight, "measure", lambda *arguments, **options: [])
    result = call("v04")
    assert (
        result.exit_code == 1 and "other kernels were launched on the GPU, none, than in the emulator" in result.stderr
    )
    assert hardware.stored() == []


@pytest.mark.parametrize("other", [{"grid": (3, 1, 1)}, {"block": (64, 1, 1)}])
def test_another_launch_is_no_measurement(gpu, monkeypatch, other):
    """As of a version that takes another tile shape on the GPU than in the emulator."""
    launch = gpu.launch
    monkeypatch.setattr(gpu, "launch", lambda *arguments: dataclasses.replace(launch(*arguments), **other))
    result = call("v04")
    grid, block = ({"grid": (2, 1, 1), "block": (128, 1, 1)} | other).values()
    assert result.exit_code == 1 and hardware.stored() == []
    assert f"on the GPU, attention_kernel<32> {grid} of {block} threads, than in the emulator" in result.stderr


def test_a_version_is_run_in_each_of_its_dtypes(monkeypatch):
    monkeypatch.setattr(hardware, "PROBLEMS", ({"head_dim": 64}, {"head_dim": 64}, {"head_dim": 128}))
    half = dataclasses.replace(registry.resolve("v04"), dtypes=("float16", "bfloat16"), head_dims=(32, 64))
    monkeypatch.setattr(hardware.registry, "resolve", lambda name: half)
    assert [problem.dtype for _, problem in hardware.calls(["v04", "v04"])] == ["float16", "bfloat16"]


def test_one_that_fails_leaves_the_others_their_rows(gpu, monkeypatch):
    def fail(version, *arguments, **options):
        if version.number == 3:
            raise nsight.NsightError("v03_warp_local fails: no luck")
        return gpu.measure(version, *arguments, **options)

    monkeypatch.setattr(nsight, "measure", fail)
    result = call("v03", "v04", "--no-keep")
    assert result.exit_code == 1 and "fails: no luck" in result.stderr
    assert "v04_vectorized" in result.stdout and "v03_warp_local" not in result.stdout
    assert hardware.stored() == []


def test_ctrl_c_keeps_what_was_measured(gpu, monkeypatch):
    def interrupt(version, *arguments, **options):
        if version.number == 4:
            raise KeyboardInterrupt
        return gpu.measure(version, *arguments, **options)

    monkeypatch.setattr(nsight, "measure", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hardware.measure(hardware.calls(["v03", "v04"]))
    assert [each["version"] for each in hardware.stored()] == ["v03_warp_local"]


def test_a_readers_own_kernel_is_measured_and_not_kept(gpu, tmp_path):
    own = tmp_path / "my_v03.cu"
    own.write_bytes(registry.resolve("v03").source.read_bytes())
    assert "my_v03.cu" in call(own).stdout
    assert hardware.stored() == []


# ---------------------------------------------------------------------------------------------- refusals


refused = partial(command.refused, "hardware")


def test_refusals(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no CUDA GPU to hold the emulator against: --stored shows" in refused()
    assert "unknown version 'v99'" in refused("v99")
    assert "unknown version 'v99'" in refused("--stored", "v99")


def test_without_ncu_nothing_is_run(gpu, monkeypatch):
    def missing():
        raise FileNotFoundError("there is no ncu")

    monkeypatch.setattr(nsight, "find_ncu", missing)
    monkeypatch.setattr(hardware, "_rows", lambda *_: pytest.fail("was run"))
    assert "there is no ncu" in refused("v04")


def test_a_damaged_table_is_left_as_it_is(gpu, monkeypatch, tmp_path):
    path = tmp_path / "counters" / "test.json"
    path.parent.mkdir()
    path.write_text("{")
    monkeypatch.setattr(hardware, "_rows", lambda *_: pytest.fail("was run"))
    assert "test.json is damaged" in refused("v04")
    assert "test.json is damaged" in refused("--stored")
    assert path.read_text() == "{"


# ---------------------------------------------------------------------------------------------- explanations


@pytest.mark.parametrize(
    ("counter", "emulated", "counted", "source", "code", "reason"),
    [
        ("shared_load_requests", 100, 50, {4}, ["LDS", "LDS.64"],
         "nvcc makes one LDS.64 of several 4-byte shared loads"),
        ("shared_load_wavefronts", 100, 26, {4}, ["LDS.128", "LDS.U.64"],
         "nvcc makes one LDS.128 or LDS.64 of several 4-byte shared loads"),
        ("shared_load_wavefronts", 100, 24, {4}, ["LDS.128"], None),  # fewer than 16 bytes at a time could make it
        ("shared_load_requests", 100, 101, {4}, ["LDS.64"], None),  # and never more
        ("shared_load_conflicts", 100, 0, {4}, ["LDS.64"], "nvcc makes one LDS.64 of several 4-byte shared loads"),
        ("shared_load_requests", 100, 50, {4}, ["LDS", "STS.64", "LDG.E.64", "LDSM.16.M88.4"], None),
        ("global_store_requests", 100, 120, {8}, ["STG.E", "STG.E.64"],
         "nvcc splits 8-byte global stores into STG"),
        ("global_load_sectors", 100, 50, {2, 4}, ["LDG.E.128.CONSTANT"],
         "nvcc makes one LDG.128 of several 2 and 4-byte global loads"),
        ("global_load_sectors", 100, 120, {4}, ["LDG.E.U16"], "nvcc splits 4-byte global loads into LDG.U16"),
        ("global_load_sectors", 0, 120, set(), ["LDG.E"], None),
        ("barriers", 100, 50, {4}, ["BAR.SYNC"], None),
    ],
)  # fmt: skip
def test_widths_explain_what_they_can(counter, emulated, counted, source, code, reason):
    op = "_".join(counter.split("_")[:2])
    assert hardware.width_reason(counter, emulated, counted, {op: source}, code) == reason


def test_the_reason_is_seen_where_it_is_measured(gpu):
    gpu.more = {"global_store_requests": -1}
    (found,) = hardware.measure(hardware.calls(["v03"]), keep=False)
    assert found["reasons"] == {"global_store_requests": "nvcc makes one STG.64 of several 4-byte global stores"}


@pytest.mark.parametrize(
    ("text", "more", "why"),
    [
        ("@P1 LDGSTS.E.BYPASS.128 [R3], desc[UR4][R4.64]", -4, "nvcc puts copies under a predicate"),
        ("@P1 LDGSTS.E.BYPASS.128 [R3], desc[UR4][R4.64]", 400, None),
        ("LDGSTS.E.BYPASS.128 [R3], desc[UR4][R4.64]", -4, None),
        ("@P1 LDG.E [R3], desc[UR4][R4.64]", -4, None),
    ],
)
def test_copies_under_a_predicate_are_seen_where_they_are_measured(gpu, monkeypatch, text, more, why):
    kernel = inspect.Kernel("k", "k", 32, 0, 0, 0, 0, sass=(inspect.Instruction(0, text, "", 0),))
    found = inspect.Inspection("v", "sm_90", 64, "float16", (kernel,), ())
    monkeypatch.setattr(inspect, "inspect", lambda *arguments, **options: found)
    monkeypatch.setattr(hardware, "TOLERANCES", ())
    gpu.more = {"cp_async_wavefronts": more}
    (row,) = hardware.measure(hardware.calls(["v05"]), keep=False)
    assert hardware.differing(row) == ["cp_async_wavefronts"]
    reason = hardware.reason(row, "cp_async_wavefronts")
    assert reason.startswith(why) if why else reason is None


def test_without_nvcc_a_difference_is_not_explained(gpu, monkeypatch):
    def fail(*arguments, **options):
        raise build.BuildError("no nvcc")

    monkeypatch.setattr(inspect, "inspect", fail)
    (found,) = hardware.measure(hardware.calls(["v03"]), keep=False)
    assert found["reasons"] == {} and hardware.differing(found) == ["global_store_requests"]
    (line,) = hardware.unexplained([found])
    assert line.startswith("v03_warp_local, B=1 Hq=2 Hkv=2 M=16 N=20 D=32 causal float32: global_store_requests is ")


def test_a_declared_reason_holds_only_as_far_as_it_says(monkeypatch):
    ragged = hardware.Known(("barriers",), 0.05, "edges", lambda row: row["keys"] % 32 != 0)
    monkeypatch.setattr(hardware, "KNOWN", (ragged,))
    assert hardware.reason(row(keys=203, counted={"barriers": 104}), "barriers") == "edges"
    assert hardware.reason(row(keys=203, counted={"barriers": 96}), "barriers") == "edges"
    assert hardware.reason(row(keys=203, counted={"barriers": 106}), "barriers") is None
    assert hardware.reason(row(keys=512, counted={"barriers": 104}), "barriers") is None
    assert hardware.reason(row(keys=203, counted={"shuffles": 104}), "shuffles") is None
    assert hardware.reason(row(), "barriers") == ""


@needs_table
def test_what_is_known_of_v00_is_worked_out():
    """The sectors of one pass along every row, as the source has it and as nvcc does: both by hand."""
    ragged = [each for each in STORED if each["version"] == "v00_naive" and each["keys"] % 32]
    assert ragged
    for stored in ragged:
        keys, lanes = stored["keys"], np.arange(32)
        rounds = -(-(keys - lanes) // 32)  # of each lane
        left_over = rounds % 4
        source = [lanes[i < rounds] + 32 * i for i in range(max(rounds))]
        nvcc = [lanes[i < left_over] + 32 * i for i in range(max(left_over))]
        nvcc += [
            lanes[left_over + i < rounds] + 32 * (left_over + i)[left_over + i < rounds] for i in range(max(rounds))
        ]
        rows = stored["batch"] * stored["heads"] * stored["queries"]
        more = sum(
            sum(len(np.unique((row * keys + words) // 8)) * sign for words in accesses)
            for row in range(rows)
            for sign, accesses in ((1, nvcc), (-1, source))
        )
        for counter, passes in (("global_load_sectors", 3), ("global_store_sectors", 2)):
            assert stored["hardware"][counter] - stored["emulator"][counter] == passes * more != 0
            assert "a round behind" in hardware.reason(stored, counter)


@needs_table
def test_what_is_known_of_v08_is_in_its_machine_code():
    stored = [each for each in STORED if each["version"] == "v08_fused_softmax"]
    less = [each for each in stored if hardware.share(each, "cp_async_wavefronts") < 0]
    assert less
    for each in less:
        blocks = each["batch"] * each["heads"] * -(-each["queries"] // 64)
        one_tile = 64 * each["head_dim"] * 2 // 128  # wavefronts
        missing = each["emulator"]["cp_async_wavefronts"] - each["hardware"]["cp_async_wavefronts"]
        assert 0.9 * blocks * one_tile < missing <= blocks * one_tile
    if inspect.disassembler() is None or build.nvcc() is None:
        pytest.skip("no disassembler, or no nvcc: the machine code is not seen")
    (kernel,) = inspect.inspect(registry.resolve("v08"), "sm_90", 64, "float16").kernels
    copies = [each.text for each in kernel.sass if "LDGSTS" in each.text]
    assert 0 < sum(text.startswith("@") for text in copies) < len(copies)


def test_tolerances():
    (stores,) = (each for each in hardware.TOLERANCES if each.counters == ("global_store_sectors",))
    sectors = {"global_store_sectors": 524288}  # as measured once: 524285
    assert hardware.reason(row(emulated=sectors, counted={"global_store_sectors": 524285}), stores.counters[0])
    beyond = row(emulated=sectors, counted={"global_store_sectors": 520000})
    assert hardware.reason(beyond, "global_store_sectors") is None


# ---------------------------------------------------------------------------------------------- showing

SEVERAL = [
    row(),
    row("v02_fa2", counted={"shuffles": 49}, reasons={"shuffles": "nvcc does without"}),
    row("v05_tensor_core", keys=1000, dtype="float16", emulated={"mma": 0}, counted={"mma": 1234567}, stale=True),
]


def test_one_figure_where_both_agree_and_two_where_not():
    lines = hardware.describe(SEVERAL, "github").splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert "**B=1 Hq=2 Hkv=2 M=512 N=512 D=64 full**" in lines
    assert ["", "v04_vectorized float32", "v02_fa2 float32"] in table
    assert ["barriers", "100", "100"] in table and ["shuffles", "100", "100 → 49 a"] in table
    assert ["", "v05_tensor_core* float16"] in table and ["mma", "0 → 1,234,567 ?"] in table
    assert "a: nvcc does without (−51 %)" in lines
    assert "?: nothing explains this (from 0)" in lines
    assert "*: measured before the kernel's last change" in lines


def test_the_terminals_table_fits():
    many = [row(f"v{number:02}_with_a_name", counted={"shuffles": 10 * number}) for number in range(12)]
    text = hardware.describe(many)
    assert max(map(len, text.splitlines())) <= hardware.WIDTH
    assert text.count("shuffles") > 1 and all(each["version"] in text for each in many)


def test_json():
    entries = json.loads(hardware.describe(SEVERAL, "json"))
    assert [entry["reasons"] for entry in entries] == [{}, {"shuffles": "nvcc does without"}, {"mma": None}]
    assert entries[0]["emulator"] == row()["emulator"]


def test_the_summary_by_counter():
    table = {line[0]: line[2:] for line in hardware.summary(SEVERAL)}
    assert table["barriers"] == ["3", "3", "", ""]
    assert table["shuffles"] == ["3", "2", "−51 %", "nvcc does without"]
    assert table["mma"] == ["3", "2", "from 0", "not explained"]
    assert list(table) == [name.replace("_", " ") for name in COUNTERS]


def test_the_emulators_readme_is_current():
    text = (ROOT / "kernels" / "emulator" / "README.md").read_text()
    part = re.search(r"<!-- generated: agreement -->\n(.*?)\n<!-- end -->", text, flags=re.DOTALL)
    assert part[1] == hardware.agreement(STORED), "make docs"


def test_the_readmes_part_names_gpu_date_versions_and_reasons():
    rows = [{**each, "gpu": "NVIDIA H200", "date": "2026-11-29T14:34:36+00:00"} for each in SEVERAL]
    text = hardware.agreement(rows)
    lines = text.splitlines()
    assert lines[0] == "3 calls on NVIDIA H200 (2026-11-29): v02_fa2, v04_vectorized, v05_tensor_core."
    assert sum(line.startswith("| ") for line in lines) == 2 + len(COUNTERS)
    assert "| shuffles | `sass__inst_executed_per_opcode[SHFL]` | 3 | 2 | −51 % | (b) |" in lines
    assert lines[-3:] == ["(a) not explained.", "", "(b) nvcc does without."]
    assert hardware.agreement([]) == "No GPU has been measured yet."


def test_letters():
    assert [hardware.letters(number) for number in (0, 1, 25, 26, 27, 52)] == ["a", "b", "z", "aa", "ab", "ba"]
