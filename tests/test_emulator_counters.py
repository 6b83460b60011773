"""The emulator's counters against hand-worked theory, and against what Nsight Compute measured on an H200."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import flash_tutorial
from flash_tutorial import emulator

HERE = Path(__file__).parent
LANES = np.arange(32)
MEASURED = json.loads((HERE / "data" / "h200_warp_accesses.json").read_text())["accesses"]


@pytest.fixture(scope="module")
def accesses():
    return emulator.compile(HERE / "emulator_kernels" / "accesses.cu")


def access(module: emulator.Module, instruction: str, offsets: np.ndarray) -> emulator.Counters:
    """What one warp's access costs: lane i at byte offsets[i], or not at all where that is negative."""
    offsets = np.ascontiguousarray(offsets, np.int32)
    name, _, width = instruction.lower().partition(".")
    words = 4 if width == "x4" else int(width) // 32
    extent = int(offsets.max()) // 16 * 16 + 16
    registers = np.zeros((32, words), np.uint32 if name == "ldsm" else np.float32)
    kernel = f"{name}_{width}"
    if name == "ldg":
        report = module.launch(kernel, 1, 32, offsets, np.zeros(extent, np.uint8), registers)
        return report.line("*reinterpret_cast<const Vector*>(memory + offset);").counters
    if name == "stg":
        # Two lanes may store to one place here: what a GPU then counts is measured, what it leaves is not asked.
        arguments = (offsets, registers, np.zeros(extent, np.uint8))
        return module.launch(kernel, 1, 32, *arguments, raise_on_finding=False).totals
    if name == "sts":
        return module.launch(kernel, 1, 32, offsets, registers, shared_bytes=extent, raise_on_finding=False).totals
    return module.launch(kernel, 1, 32, offsets, extent, registers, shared_bytes=extent).totals


def measured_name(entry: dict) -> str:
    return f"{entry['instruction']}-{entry['pattern']}"


@pytest.mark.parametrize("entry", MEASURED, ids=measured_name)
def test_equals_what_an_h200_counts(accesses, entry):
    counters = access(accesses, entry["instruction"], entry["offsets"])
    if entry["instruction"].startswith(("LDG", "STG")):
        kind = "load" if entry["instruction"].startswith("LDG") else "store"
        requests, sectors = (getattr(counters, f"global_{kind}_{what}") for what in ("requests", "sectors"))
        assert (requests, sectors) == (entry["requests"], entry["sectors"])
    else:
        kind = "store" if entry["instruction"].startswith("STS") else "load"
        assert getattr(counters, f"shared_{kind}_wavefronts") == entry["wavefronts"]


def test_all_measured_accesses_are_there():
    assert len(MEASURED) == 340
    assert {entry["instruction"] for entry in MEASURED} == {
        f"{name}.{bits}" for name in ("LDG", "STG", "LDS", "STS") for bits in (32, 64, 128)
    } | {"LDSM.x4"}


# A full warp of 4-byte accesses to 128 neighbouring bytes touches 4 sectors; 8 and 16 bytes a lane touch 8 and 16. One
# address touches one sector; rows 128 bytes apart or more touch one sector a lane; one byte off the grid, one more.
SECTORS = {
    "coalesced 4": ("32", 4 * LANES, 4),
    "coalesced 8": ("64", 8 * LANES, 8),
    "coalesced 16": ("128", 16 * LANES, 16),
    "reversed 4": ("32", 4 * LANES[::-1], 4),
    "shifted 4": ("32", 4 * LANES + 4, 5),
    "broadcast 4": ("32", 0 * LANES, 1),
    "broadcast 16": ("128", 0 * LANES, 1),
    "row per thread 4": ("32", 128 * LANES, 32),
    "row per thread 16": ("128", 256 * LANES, 32),
    "every other 4": ("32", 8 * LANES, 8),
    "one lane": ("32", np.where(LANES == 7, 64, -1), 1),
    "half a warp 4": ("32", np.where(LANES < 16, 4 * LANES, -1), 2),
}


@pytest.mark.parametrize("case", SECTORS)
def test_sectors_by_hand(accesses, case):
    width, offsets, sectors = SECTORS[case]
    lanes, size = int((offsets >= 0).sum()), int(width) // 8
    loads = access(accesses, f"LDG.{width}", offsets)
    assert (loads.global_load_requests, loads.global_load_sectors) == (1, sectors)
    assert loads.global_load_bytes == lanes * size
    assert loads.global_load_sectors_per_request == sectors
    stores = access(accesses, f"STG.{width}", offsets)
    assert (stores.global_store_requests, stores.global_store_sectors) == (1, sectors)
    assert stores.global_store_bytes == lanes * size


ROW, CHUNK = (
    LANES % 16,
    LANES // 16,
)  # ldmatrix.x4 of a 16 x 16 tile: lane i gives row i % 16, 8 columns from 8 * (i // 16)
# 32 banks of 4 bytes serve one wavefront. Wavefronts, and how few the same bytes would need if no two met in a bank.
WAVEFRONTS = {
    "column, stride 64": ("LDS.32", 4 * 64 * LANES, 32, 1),
    "column, stride 65": ("LDS.32", 4 * 65 * LANES, 1, 1),
    "column, stride 66": ("LDS.32", 4 * 66 * LANES, 2, 1),
    "broadcast": ("LDS.32", 0 * LANES, 1, 1),
    "row": ("LDS.32", 4 * LANES, 1, 1),
    "row of 8 bytes": ("LDS.64", 8 * LANES, 2, 2),
    "row of 16 bytes": ("LDS.128", 16 * LANES, 4, 4),
    "two words of one bank": ("LDS.32", np.where(LANES == 31, 128, 4 * LANES), 2, 1),
    "ldmatrix, rows of 128 bytes": ("LDSM.x4", 128 * ROW + 16 * CHUNK, 32, 4),
    "ldmatrix, XOR swizzle": ("LDSM.x4", 128 * ROW + 16 * (CHUNK ^ (ROW % 8)), 4, 4),
    "ldmatrix, rows padded to 144 bytes": ("LDSM.x4", 144 * ROW + 16 * CHUNK, 4, 4),
    "ldmatrix, rows of 64 bytes": ("LDSM.x4", 64 * ROW + 16 * CHUNK, 16, 4),
    "store column, stride 64": ("STS.32", 4 * 64 * LANES, 32, 1),
    "store column, stride 65": ("STS.32", 4 * 65 * LANES, 1, 1),
    "store row of 16 bytes": ("STS.128", 16 * LANES, 4, 4),
}


@pytest.mark.parametrize("case", WAVEFRONTS)
def test_bank_conflicts_by_hand(accesses, case):
    instruction, offsets, wavefronts, ideal = WAVEFRONTS[case]
    counters = access(accesses, instruction, offsets)
    kind = "store" if instruction.startswith("STS") else "load"
    assert getattr(counters, f"shared_{kind}_requests") == 1
    assert getattr(counters, f"shared_{kind}_wavefronts") == wavefronts
    assert getattr(counters, f"shared_{kind}_conflicts") == wavefronts - ideal
    assert getattr(counters, f"shared_{kind}_ways") == wavefronts / ideal
    assert counters.ldmatrix == instruction.startswith("LDSM")


@pytest.mark.parametrize("pitch, wavefronts", [(32, 32 * 32), (33, 32)])
def test_counters_by_source_line(accesses, pitch, wavefronts):
    matrix = np.arange(32 * 32, dtype=np.float32).reshape(32, 32)
    out = np.zeros_like(matrix)
    report = accesses.launch("transpose", 1, (32, 8), matrix, out, pitch, shared_bytes=32 * pitch * 4)
    np.testing.assert_array_equal(out, matrix.T)
    expected = {  # 8 warps, 4 rows each
        "const float value = in[y * 32 + x];": emulator.Counters(
            global_load_requests=32, global_load_sectors=128, global_load_bytes=4096
        ),
        "tile[y * pitch + x] = value;": emulator.Counters(shared_store_requests=32, shared_store_wavefronts=32),
        "__syncthreads();": emulator.Counters(barriers=8),
        "const float value = tile[x * pitch + y];": emulator.Counters(
            shared_load_requests=32, shared_load_wavefronts=wavefronts, shared_load_conflicts=wavefronts - 32
        ),
        "out[y * 32 + x] = value;": emulator.Counters(
            global_store_requests=32, global_store_sectors=128, global_store_bytes=4096
        ),
    }
    assert {line.text: line.counters for line in report.lines} == expected
    assert report.totals == sum(expected.values(), emulator.Counters())
    numbers = [line.line for line in report.lines]
    assert numbers == sorted(numbers) and {line.file for line in report.lines} == {str(accesses.source)}


def test_the_table_shows_lines_and_totals(accesses):
    matrix = np.zeros((32, 32), np.float32)
    report = accesses.launch("transpose", 1, (32, 8), matrix, matrix.copy(), 32, shared_bytes=4096)
    first, second, _, *rows, total = report.table().splitlines()
    assert "conflicts" in second and "mma" not in first
    assert "load conflicts" in report.table(fmt="github").splitlines()[0]
    conflicted = next(row for row in rows if "tile[x * pitch + y]" in row)
    line = report.line("tile[x * pitch + y]")
    assert f"accesses.cu:{line.line}" in conflicted and "992" in conflicted
    assert total.startswith("total") and "992" in total
    assert report._repr_html_().startswith("<table>")
    assert str(report) == report.table()


def test_every_counter_is_in_the_glossary():
    glossary = emulator.Counters.glossary()
    for name in vars(emulator.Counters()):
        assert name in glossary


@pytest.mark.parametrize("threads", [2, 5])
def test_counters_do_not_depend_on_the_number_of_cores(accesses, threads):
    matrices = np.arange(16 * 32 * 32, dtype=np.float32).reshape(16, 32, 32)

    def launch(threads: int) -> emulator.Report:
        out = np.zeros_like(matrices)
        with emulator.instrument(threads=threads) as report:
            accesses.launch("transpose", 16, (32, 8), matrices, out, 32, shared_bytes=4096)
        np.testing.assert_array_equal(out, matrices.swapaxes(1, 2))
        return report

    alone, together = launch(1), launch(threads)
    assert alone.lines == together.lines
    assert alone.totals.shared_load_wavefronts == 16 * 1024


@pytest.mark.parametrize("version", [version.name for version in flash_tutorial.versions()])
def test_a_versions_counters_do_not_depend_on_the_number_of_cores(version):
    torch.manual_seed(0)
    dtype = getattr(torch, flash_tutorial.version(version).dtypes[0])
    q, k, v = (torch.randn(1, 4, length, 64, dtype=dtype) for length in (50, 70, 70))
    reports = []
    for threads in (1, 3):
        with emulator.instrument(threads=threads) as report:
            flash_tutorial.attention(q, k, v, version=version, causal=True)
        reports.append(report)
    assert reports[0].lines == reports[1].lines


@pytest.mark.parametrize("reading", [0, 1, 32])
def test_a_cp_async_that_only_fills_with_zeros_asks_nothing_of_global_memory(reading):
    """As an H200 counts: the instruction is executed all the same."""
    module = emulator.compile(HERE / "emulator_kernels" / "collectives.cu")
    source, out = np.ones((32, 16), np.uint8), np.zeros((32, 16), np.uint8)
    sizes = np.repeat([16, 0], [reading, 32 - reading]).astype(np.int32)
    counters = module.launch("cp_async_zero_fill", 1, 32, source, sizes, out, shared_bytes=512).totals
    of_sizes = 1
    assert counters.cp_async == 1
    assert counters.global_load_requests == of_sizes + (reading > 0)
    assert counters.global_load_bytes == 32 * 4 + reading * 16
