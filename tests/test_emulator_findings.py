"""Kernels with one mistake each: the emulator names the mistake and its line, and is silent once it is mended."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from flash_tutorial import KernelFinding, emulator

KERNELS = Path(__file__).parent / "emulator_kernels"


@pytest.fixture(scope="module")
def broken():
    return emulator.compile(KERNELS / "broken.cu")


@pytest.fixture(scope="module")
def broken_plain():
    """Without hooks at memory accesses: what is found there is found in every quick run too."""
    return emulator.compile(KERNELS / "broken.cu", instrumented=False)


@pytest.fixture(scope="module")
def sound():
    return emulator.compile(KERNELS / "sound.cu")


def ramp(*shape: int, dtype=np.float32) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


@dataclass(frozen=True)
class Mistake:
    """A kernel of broken.cu, how to launch it, and what must be said of it."""

    kernel: str
    kind: str
    lines: tuple[str, ...]  # source that the finding's locations show, in any order
    arguments: tuple  # arrays, each copied for a launch, and numbers
    block: int
    grid: int = 1
    shared: int = 0
    space: str = ""
    buffer: str = ""
    plain: bool = False  # the build without hooks finds it too
    result: np.ndarray | None = None  # of the mended kernel, in the last array

    def launch(self, module: emulator.Module, variant: str, **options) -> tuple[emulator.Report, list]:
        arguments = [a.copy() if isinstance(a, np.ndarray) else a for a in self.arguments]
        name = f"{self.kernel}_{variant}"
        report = module.launch(name, self.grid, self.block, *arguments, shared_bytes=self.shared, **options)
        return report, [a for a in arguments if isinstance(a, np.ndarray)]


MISTAKES = [
    Mistake(
        "missing_syncthreads",
        "race",
        ("tile[threadIdx.x] = in[threadIdx.x];", "out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];"),
        (ramp(64), np.zeros(64, np.float32)),
        block=64,
        shared=256,
        space="shared",
        result=ramp(64)[::-1],
    ),
    Mistake(
        "missing_syncwarp",
        "race",
        ("tile[threadIdx.x] = in[threadIdx.x];", "out[threadIdx.x] = tile[threadIdx.x ^ 1];"),
        (ramp(32), np.zeros(32, np.float32)),
        block=32,
        shared=128,
        space="shared",
        result=ramp(32)[np.arange(32) ^ 1],
    ),
    Mistake(
        "overwritten_too_early",
        "race",
        ("sum += tile[blockDim.x - 1 - threadIdx.x];", "tile[threadIdx.x] = in[step * blockDim.x + threadIdx.x];"),
        (ramp(3, 64), np.zeros(64, np.float32), 3),
        block=64,
        shared=256,
        space="shared",
        result=ramp(3, 64).sum(0)[::-1],
    ),
    Mistake(
        "same_place",
        "race",
        ("tile[MENDED ? threadIdx.x : threadIdx.x / 2] = threadIdx.x;",) * 2,
        (np.zeros(32, np.float32),),
        block=32,
        shared=128,
        space="shared",
        result=(np.arange(32) // 2).astype(np.float32),
    ),
    Mistake(
        "blocks_collide",
        "race",
        ("out[MENDED ? blockIdx.x * blockDim.x + threadIdx.x : threadIdx.x] = threadIdx.x;",) * 2,
        (np.zeros((2, 64), np.float32),),
        grid=2,
        block=64,
        space="global",
        buffer="out",
        result=np.tile(ramp(64), (2, 1)),
    ),
    Mistake(
        "missing_wait",
        "missing_wait",
        ("out[threadIdx.x] = tile[threadIdx.x];",),
        (ramp(32, 4), np.zeros((32, 4), np.float32)),
        block=32,
        shared=512,
        space="shared",
        result=ramp(32, 4),
    ),
    Mistake(
        "waited_for_too_few",
        "missing_wait",
        ("out[threadIdx.x] = tile[blockDim.x + threadIdx.x];",),
        (ramp(64, 4), np.zeros((32, 4), np.float32)),
        block=32,
        shared=1024,
        space="shared",
        result=ramp(64, 4)[32:],
    ),
    Mistake(
        "wait_without_barrier",
        "race",
        ("out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];",),
        (ramp(64, 4), np.zeros((64, 4), np.float32)),
        block=64,
        shared=1024,
        space="shared",
        result=ramp(64, 4)[::-1],
    ),
    Mistake(
        "global_out_of_bounds",
        "out_of_bounds",
        ("out[i] = in[i] + 1.f;",),
        (ramp(100), np.zeros(100, np.float32), 100),
        grid=2,
        block=64,
        space="global",
        buffer="in",
        result=ramp(100) + 1,
    ),
    Mistake(
        "global_store_out_of_bounds",
        "out_of_bounds",
        ("if (!MENDED || i < n) out[i] = value;",),
        (ramp(100), np.zeros(100, np.float32), 100),
        grid=2,
        block=64,
        space="global",
        buffer="out",
        result=ramp(100),
    ),
    Mistake(
        "shared_out_of_bounds",
        "out_of_bounds",
        ("out[threadIdx.x] = tile[next];",),
        (ramp(64), np.zeros(64, np.float32)),
        block=64,
        shared=256,
        space="shared",
        result=np.roll(ramp(64), -1),
    ),
    Mistake(
        "unwritten_shared",
        "uninitialized",
        ("out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];",),
        (ramp(64) + 1, np.zeros(64, np.float32), 50),
        block=64,
        shared=256,
        space="shared",
        result=np.where(ramp(64) < 50, ramp(64) + 1, 0)[::-1],
    ),
    Mistake(
        "divergent_barrier",
        "divergent_barrier",
        ("__syncthreads();  // odd", "__syncthreads();  // even"),
        (np.zeros(64, np.float32),),
        block=64,
        plain=True,
        result=np.full(64, 3, np.float32),
    ),
    Mistake(
        "deadlock",
        "deadlock",
        ("__syncwarp(MENDED ? 0xfffffffeu : 0xffffffffu);  // the others", "__syncthreads();"),
        (np.zeros(32, np.float32),),
        block=32,
        plain=True,
        result=np.ones(32, np.float32),
    ),
    Mistake(
        "not_in_the_mask",
        "warp_mask",
        ("out[threadIdx.x] = __shfl_sync(MENDED ? 0xffffffffu : 0xfffffffeu, value, 1);",),
        (ramp(32), np.zeros(32, np.float32)),
        block=32,
        plain=True,
        result=np.ones(32, np.float32),
    ),
    Mistake(
        "shuffled_from_nobody",
        "warp_mask",
        ("out[threadIdx.x] = __shfl_sync(0x0000ffffu, value, MENDED ? threadIdx.x ^ 1 : threadIdx.x + 1);",),
        (ramp(32), np.zeros(32, np.float32)),
        block=32,
        plain=True,
        result=np.where(ramp(32) < 16, ramp(32)[np.arange(32) ^ 1], 0),
    ),
    Mistake(
        "write_to_input",
        "write_to_input",
        ("target[threadIdx.x] = in[threadIdx.x] * 2.f;",),
        (ramp(32), np.zeros(32, np.float32)),
        block=32,
        space="global",
        buffer="in",
        result=ramp(32) * 2,
    ),
    Mistake(
        "misaligned_global",
        "misaligned",
        ("out[threadIdx.x] = *reinterpret_cast<const float4*>(start + threadIdx.x * 4);",),
        (ramp(132), np.zeros((32, 4), np.float32)),
        block=32,
        space="global",
        result=ramp(132)[4:].reshape(32, 4),
    ),
    Mistake(
        "misaligned_shared",
        "misaligned",
        ("out[threadIdx.x] = *reinterpret_cast<const float2*>(tile + threadIdx.x * 2 + (MENDED ? 0 : 1));",),
        (ramp(65), np.zeros((32, 2), np.float32)),
        block=32,
        shared=260,
        space="shared",
        result=ramp(64).reshape(32, 2),
    ),
    Mistake(
        "division_by_zero",
        "crash",
        ("out[threadIdx.x] = MENDED && divisor == 0 ? 0 : 100 / divisor;",),
        (ramp(32, dtype=np.int32), np.zeros(32, np.int32)),
        block=32,
        plain=True,
        result=np.array([0] + [100 // i for i in range(1, 32)], np.int32),
    ),
    Mistake(
        "stack_overflow",
        "crash",
        (),  # somewhere in the recursion
        (ramp(1) + 1, np.zeros(32, np.float32)),
        block=32,
        plain=True,
        result=np.ones(32, np.float32),
    ),
    Mistake(
        "failed_assert",
        "crash",
        ("assert(MENDED || threadIdx.x != 3);",),
        (np.zeros(32, np.float32),),
        block=32,
        plain=True,
        result=np.ones(32, np.float32),
    ),
    Mistake(
        "unwritten_static",
        "uninitialized",
        ("out[threadIdx.x] = tile[threadIdx.x];",),
        (np.zeros(32, np.float32),),
        block=32,
        space="shared",
        result=np.ones(32, np.float32),
    ),
    Mistake(
        "barrier_for_half_a_warp",
        "crash",
        ("flash::ptx::bar_sync(1, MENDED ? 64 : 48);",),
        (np.zeros(64, np.float32),),
        block=64,
        plain=True,
        result=np.ones(64, np.float32),
    ),
]
IN_PLAIN_BUILDS = [mistake for mistake in MISTAKES if mistake.plain]


def by_kernel(mistake: Mistake) -> str:
    return mistake.kernel


def assert_names(error: KernelFinding, mistake: Mistake) -> None:
    finding = error.findings[0]
    assert finding.kind == mistake.kind, finding
    assert finding.kernel == f"{mistake.kernel}_broken"
    assert {location.text for location in finding.locations} >= set(mistake.lines), finding
    assert finding.space == mistake.space
    for location in finding.locations:
        assert Path(location.file) == KERNELS / "broken.cu"
        assert f"broken.cu:{location.line}" in str(error) and location.text in str(error)
    if mistake.buffer:
        assert finding.buffer == mistake.buffer and repr(mistake.buffer) in str(error)


@pytest.mark.parametrize("mistake", MISTAKES, ids=by_kernel)
def test_a_mistake_is_reported_by_its_line(broken, mistake):
    with pytest.raises(KernelFinding) as caught:
        mistake.launch(broken, "broken")
    assert_names(caught.value, mistake)


@pytest.mark.parametrize("mistake", MISTAKES, ids=by_kernel)
def test_the_mended_kernel_is_clean_and_right(broken, mistake):
    report, arrays = mistake.launch(broken, "mended")
    assert report.findings == []
    np.testing.assert_array_equal(arrays[-1], mistake.result)


@pytest.mark.parametrize("mistake", IN_PLAIN_BUILDS, ids=by_kernel)
def test_the_plain_build_reports_what_it_can(broken_plain, mistake):
    with pytest.raises(KernelFinding) as caught:
        mistake.launch(broken_plain, "broken")
    assert_names(caught.value, mistake)
    report, arrays = mistake.launch(broken_plain, "mended")
    assert report.findings == []
    np.testing.assert_array_equal(arrays[-1], mistake.result)


def named(kernel: str) -> Mistake:
    return next(mistake for mistake in MISTAKES if mistake.kernel == kernel)


def test_a_race_says_who_did_what(broken):
    report, _ = named("missing_syncthreads").launch(broken, "broken", raise_on_finding=False)
    (race,) = report.findings
    assert race.block == (0, 0, 0)
    assert sorted(race.actions) == ["shared_load", "shared_store"]
    first, second = race.threads
    assert first // 32 != second // 32  # the lanes of one warp read what the other wrote
    assert first + second == 63 and race.offset in (4 * first, 4 * second)
    assert race.count >= 1 and "__syncthreads()" in race.message


def test_a_race_inside_a_warp_asks_for_syncwarp(broken):
    report, _ = named("missing_syncwarp").launch(broken, "broken", raise_on_finding=False)
    assert "__syncwarp() between the two lines" in report.findings[0].message


def test_an_access_out_of_bounds_says_where(broken):
    report, _ = named("global_store_out_of_bounds").launch(broken, "broken", raise_on_finding=False)
    finding = report.findings[0]
    assert (finding.block, finding.threads, finding.offset, finding.bytes) == ((1, 0, 0), (36,), 400, 4)
    report, _ = named("shared_out_of_bounds").launch(broken, "broken", raise_on_finding=False)
    assert (report.findings[0].threads, report.findings[0].offset) == ((63,), 256)


@pytest.mark.parametrize("kernel", ["global_store_out_of_bounds", "write_to_input"])
def test_a_forbidden_store_is_not_carried_out(broken, kernel):
    """The arrays are the middle of larger ones: nothing around the output changes, nor does the input."""
    around = np.full(64 + 100 + 64, 7, np.float32)
    source, target = around.copy(), around.copy()
    arguments = [source[64:164], target[64:164]] + [100] * (kernel == "global_store_out_of_bounds")
    with pytest.raises(KernelFinding):
        broken.launch(f"{kernel}_broken", 2 if "out_of" in kernel else 1, 64, *arguments)
    assert np.array_equal(source, around)
    assert np.array_equal(target[:64], around[:64]) and np.array_equal(target[164:], around[164:])


def test_a_missing_wait_gives_nan_and_never_luck(broken):
    _, (_, out) = named("missing_wait").launch(broken, "broken", raise_on_finding=False)
    assert np.isnan(out).all()


def test_unwritten_shared_memory_reads_as_nan(broken):
    _, (_, out) = named("unwritten_shared").launch(broken, "broken", raise_on_finding=False)
    assert np.isnan(out[:14]).all() and not np.isnan(out[14:]).any()


@pytest.mark.parametrize("arch, limit", [("sm_75", 64), ("sm_80", 163), ("sm_86", 99), ("sm_89", 99), ("sm_90", 227)])
def test_the_shared_memory_budget_is_the_architectures(broken, arch, limit):
    with emulator.instrument(arch=arch):
        broken.launch("fill", 1, 32, np.zeros(32, np.float32), shared_bytes=limit * 1024)
        with pytest.raises(KernelFinding) as caught:
            broken.launch("fill", 1, 32, np.zeros(32, np.float32), shared_bytes=limit * 1024 + 16)
    (finding,) = caught.value.findings
    assert finding.kind == "shared_memory_budget"
    assert str(limit * 1024) in str(caught.value).replace(",", "")


@pytest.mark.parametrize(
    "grid, block", [((1,), (1025,)), ((1,), (32, 33)), ((1,), (1, 1, 65)), ((1, 65536), (32,)), ((0,), (32,))]
)
def test_a_launch_that_a_gpu_refuses_is_refused(broken, grid, block):
    out = np.zeros(32, np.float32)
    with pytest.raises(KernelFinding) as caught:
        broken.launch("fill", grid, block, out)
    assert [finding.kind for finding in caught.value.findings] == ["invalid_launch"]
    assert not out.any()


def test_the_emulator_is_usable_after_every_mistake(broken):
    for mistake in MISTAKES:
        mistake.launch(broken, "broken", raise_on_finding=False)
        _, arrays = mistake.launch(broken, "mended")
        np.testing.assert_array_equal(arrays[-1], mistake.result)


def test_every_kind_is_explained(broken):
    for mistake in MISTAKES:
        report, _ = mistake.launch(broken, "broken", raise_on_finding=False)
        message = report.findings[0].message
        assert re.search(r"means: \w.*\n\s+to mend it: \w", message), message


def test_every_kind_has_its_mistake():
    of_launches = {"shared_memory_budget", "invalid_launch"}  # two tests above
    assert {mistake.kind for mistake in MISTAKES} | of_launches == set(emulator.KINDS)


def test_a_null_pointer_is_reported_by_its_line(broken, broken_plain):
    for module, kind in ((broken, "out_of_bounds"), (broken_plain, "crash")):
        with pytest.raises(KernelFinding) as caught:
            module.launch("fill", 1, 32, None)
        (finding,) = caught.value.findings
        assert finding.kind == kind
        assert "out[blockIdx.x * blockDim.x + threadIdx.x] = 1.f;" in finding.locations[0].text


@pytest.mark.parametrize("instrumented", [True, False])
def test_a_large_array_does_not_reach_into_another_threads_stack(instrumented):
    source = """
__global__ void large_array(float* out) {
    volatile float array[1 << 18];
    array[0] = 1;
    out[threadIdx.x] = array[0];
}"""
    with pytest.raises(KernelFinding, match="stack overflow: a thread has .* KiB"):
        emulator.compile(source, instrumented).launch("large_array", 1, 32, np.zeros(32, np.float32))


def test_an_instrument_may_collect_instead_of_raising(broken):
    with emulator.instrument(raise_on_finding=False) as report:
        named("missing_syncthreads").launch(broken, "broken")
        named("misaligned_shared").launch(broken, "broken")
    assert [finding.kind for finding in report.findings] == ["race", "misaligned"]


def test_what_is_too_large_to_watch_for_races_is_refused():
    """…where the process may not have the address space for records of who accessed what."""
    program = """
import resource, numpy as np
from flash_tutorial import KernelFinding, emulator
module = emulator.compile("__global__ void fill(float* out) { out[threadIdx.x] = 1.f; }")
small, large = np.zeros(32, np.float32), np.zeros(1 << 28, np.float32)
module.launch("fill", 1, 32, small)
resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
try:
    module.launch("fill", 1, 32, large)
except KernelFinding as error:
    print([finding.kind for finding in error.findings], large.any())
module.launch("fill", 1, 32, small)
print(small.sum())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("['invalid_launch'] False\n32.0\n", "")


SOUND = (
    "bf16_halves",
    "partial_syncwarps",
    "double_buffer",
    "early_exit",
    "own_bytes",
    "own_halves",
    "many_readers",
    "pipelined_copies",
    "shared_atomics",
)


@pytest.mark.parametrize("kernel", SOUND)
def test_a_sound_kernel_is_clean(sound, kernel):
    """Patterns that a careless detector takes for races. Each kernel leaves 0…n-1 in out."""
    out = np.zeros(128, np.float32)
    report = sound.launch(kernel, 1, 128, out, shared_bytes=2048)
    assert report.findings == []
    np.testing.assert_array_equal(out, ramp(128))


def test_every_sound_kernel_is_run(sound):
    assert sound.kernels == SOUND
