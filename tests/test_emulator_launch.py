"""Small kernels launched from Python: arguments, errors, what a report holds, Ctrl-C, the progress bar, leaks."""

import io
import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch

from flash_tutorial import KernelFinding, build, emulator

SOURCE = """
#include <flash/launch.cuh>
struct Pair { int a; float b; };

// __global__ void commented_out(int n) {}
template <int N>
__global__ void a_template(float* out) {
    out[threadIdx.x] = N;
}

namespace {
/* __global__ void commented_out_too(int n) {} */
__global__ void __launch_bounds__(128) scale(const float* in, float* out, float factor, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = factor * in[i];
}
}  // namespace

__global__ void coordinates(int* out) {
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    out[block * (blockDim.x * blockDim.y * blockDim.z) + thread] = 100 * block + thread;
}

__global__ void numbers(double* out, bool yes, unsigned char small, short medium, unsigned word, long long large,
                        double real, Pair pair) {
    out[0] = yes;
    out[1] = small;
    out[2] = medium;
    out[3] = word;
    out[4] = large;
    out[5] = real;
    out[6] = pair.a + pair.b;
}

__global__ void is_null(const float* pointer, int* out) { out[0] = pointer == nullptr; }

__global__ void halves(const __half* in, __nv_bfloat16* out) {
    out[threadIdx.x] = __float2bfloat16(2.f * __half2float(in[threadIdx.x]));
}

__global__ void spin(float* out, int rounds) {
    float x = threadIdx.x;
    for (int i = 0; i < rounds; ++i) {
        x = x * 0.5f + 1.f;
        __syncthreads();
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = x;
}

__global__ void race(float* out) {
    float* tile = flash::dynamic_shared<float>();
    tile[threadIdx.x] = 1.f;
    out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}
"""


@pytest.fixture(scope="module")
def module():
    return emulator.compile(SOURCE, instrumented=False)


@pytest.fixture(scope="module")
def instrumented():
    return emulator.compile(SOURCE)


def test_kernels_are_found_and_templates_and_comments_are_not(module):
    assert module.kernels == ("scale", "coordinates", "numbers", "is_null", "halves", "spin", "race")


def test_coordinates_run_x_first(module):
    grid, block = (2, 3, 2), (4, 2, 3)
    out = np.zeros((12, 24), np.int32)
    report = module.launch("coordinates", grid, block, out)
    np.testing.assert_array_equal(out, 100 * np.arange(12)[:, None] + np.arange(24))
    (launch,) = report.launches
    assert (launch.kernel, launch.grid, launch.block) == ("coordinates", grid, block)
    assert launch.blocks_total == launch.blocks_run == 12
    assert launch.seconds > 0 and not launch.instrumented and report.lines == []


def test_numbers_and_structs_arrive(module):
    out = np.zeros(7)
    pair = np.array([(40, 2.5)], np.dtype([("a", np.int32), ("b", np.float32)])).tobytes()
    module.launch("numbers", 1, 1, out, True, 255, -(2**15), 2**32 - 1, -(2**63), 0.1, pair)
    np.testing.assert_array_equal(out, [1, 255, -(2**15), 2**32 - 1, -(2.0**63), 0.1, 42.5])
    module.launch(
        "numbers", 1, 1, out, np.bool_(False), np.uint8(7), np.int16(-1), np.uint32(5), 2**40, np.float64(2), pair
    )
    np.testing.assert_array_equal(out[:6], [0, 7, -1, 5, 2**40, 2])


def test_tensors_and_null_pointers(module):
    out = torch.zeros(5)
    module.launch("scale", 1, 32, torch.arange(5.0), out, 3.0, 5)
    assert out.tolist() == [0, 3, 6, 9, 12]
    answer = np.zeros(1, np.int32)
    module.launch("is_null", 1, 1, None, answer)
    assert answer[0] == 1
    module.launch("is_null", 1, 1, np.zeros(1, np.float32), answer)
    assert answer[0] == 0
    result = torch.zeros(32, dtype=torch.bfloat16)
    module.launch("halves", 1, 32, np.arange(32, dtype=np.float16) / 8, result)
    assert torch.equal(result.float(), torch.arange(32) / 4)


ZEROS = np.zeros(8, np.float32)
READ_ONLY = np.zeros(8, np.float32)
READ_ONLY.flags.writeable = False
PAIR = bytes(8)


@pytest.mark.parametrize(
    "kernel, arguments, error, words",
    [
        ("scales", (), ValueError, ["scales", "scale", "coordinates"]),
        ("scale", (ZEROS, ZEROS, 1.0), TypeError, ["4 arguments", "in, out, factor, n", "3 came"]),
        ("scale", ([0.0] * 8, ZEROS, 1.0, 8), TypeError, ["scale: in", "pointer", "list"]),
        ("scale", (np.zeros(8), ZEROS, 1.0, 8), TypeError, ["scale: in", "4-byte float", "float64"]),
        ("scale", (np.zeros(8, np.int32), ZEROS, 1.0, 8), TypeError, ["scale: in", "float", "int32"]),
        ("scale", (torch.zeros(8).int(), ZEROS, 1.0, 8), TypeError, ["scale: in", "float", "int32"]),
        ("scale", (np.zeros(16, np.float32)[::2], ZEROS, 1.0, 8), ValueError, ["scale: in", "contiguous"]),
        ("scale", (ZEROS, READ_ONLY, 1.0, 8), ValueError, ["scale: out", "read-only"]),
        ("scale", (ZEROS, ZEROS, 1.0, 2**31), OverflowError, ["scale: n", "2147483648", "signed"]),
        ("scale", (ZEROS, ZEROS, 1.0, 1.5), OverflowError, ["scale: n", "1.5"]),
        ("numbers", (np.zeros(7), True, 256, 0, 0, 0, 0.0, PAIR), OverflowError, ["small", "256", "unsigned"]),
        ("numbers", (np.zeros(7), True, 0, 0, -1, 0, 0.0, PAIR), OverflowError, ["word", "-1", "unsigned"]),
        ("numbers", (np.zeros(7), True, 0, 0, 0, 0, 0.0, PAIR[1:]), TypeError, ["pair", "8 bytes", "7 came"]),
    ],
)
def test_arguments_that_do_not_fit_are_refused(module, kernel, arguments, error, words):
    with pytest.raises(error) as caught:
        module.launch(kernel, 1, 32, *arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("grid, block", [((1, 1, 1, 1), 32), ((), 32), (1, -32), (1, (32, 2**32))])
def test_sizes_that_are_none_are_refused(module, grid, block):
    with pytest.raises(ValueError, match="one to three sizes"):
        module.launch("scale", grid, block, ZEROS, ZEROS.copy(), 1.0, 8)


def test_a_read_only_array_may_be_read(module):
    module.launch("scale", 1, 32, READ_ONLY, ZEROS.copy(), 1.0, 8)


# ---- compilation


def test_a_file_and_its_text_are_compiled_once_for_each_content(tmp_path):
    path = tmp_path / "mine.cu"
    path.write_text("__global__ void f(int* out) { out[0] = 1; }\n")
    out = np.zeros(1, np.int32)
    first = emulator.compile(path, instrumented=False)
    first.launch("f", 1, 1, out)
    assert out[0] == 1 and first.source == path
    assert emulator.compile(str(path), instrumented=False).library == first.library
    path.write_text("__global__ void f(int* out) { out[0] = 2; }\n")
    second = emulator.compile(path, instrumented=False)
    second.launch("f", 1, 1, out)
    assert out[0] == 2 and second.library != first.library
    first.launch("f", 1, 1, out)
    assert out[0] == 1  # the earlier one still works


def test_a_file_need_not_be_utf8(tmp_path):
    path = tmp_path / "latin.cu"
    path.write_bytes("// naïve\n__global__ void f(int* out) { out[0] = 1; }\n".encode("latin-1"))
    assert emulator.compile(path, instrumented=False).kernels == ("f",)


def test_a_compiler_error_shows_the_readers_own_line(tmp_path):
    path = tmp_path / "wrong.cu"
    path.write_text("__global__ void f(int* out) {\n    out[0] = undeclared_name;\n}\n")
    with pytest.raises(build.BuildError) as caught:
        emulator.compile(path)
    assert "wrong.cu:2" in str(caught.value) and "out[0] = undeclared_name;" in str(caught.value)


def test_what_is_no_source_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.cu"):
        emulator.compile(tmp_path / "missing.cu")
    (tmp_path / "empty.cu").write_text("int x;\n")
    with pytest.raises(ValueError, match="no __global__ function"):
        emulator.compile(tmp_path / "empty.cu")


# ---- instrument()


def test_reports_nest_and_fill_as_calls_are_made(instrumented):
    assert not emulator.is_instrumenting()
    with emulator.instrument() as outer:
        assert emulator.is_instrumenting()
        instrumented.launch("scale", 1, 32, ZEROS, ZEROS.copy(), 1.0, 8)
        assert outer.totals.global_load_requests == 1
        with emulator.instrument() as inner:
            instrumented.launch("scale", 2, 32, ZEROS, ZEROS.copy(), 1.0, 8)
        assert emulator.is_instrumenting()
    assert not emulator.is_instrumenting()
    assert [launch.grid[0] for launch in outer.launches] == [1, 2]
    assert [launch.grid[0] for launch in inner.launches] == [2]
    instrumented.launch("scale", 1, 32, ZEROS, ZEROS.copy(), 1.0, 8)
    assert len(outer.launches) == 2


def test_reports_may_be_closed_in_any_order(instrumented):
    first, second = emulator.instrument(), emulator.instrument()
    one, two = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    instrumented.launch("scale", 1, 32, ZEROS, ZEROS.copy(), 1.0, 8)
    second.__exit__(None, None, None)
    assert (len(one.launches), len(two.launches)) == (0, 1)


def test_a_finding_survives_pickling(instrumented):
    with pytest.raises(KernelFinding) as caught:
        instrumented.launch("race", 1, 64, np.zeros(64, np.float32), shared_bytes=256)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value) and copy.findings == caught.value.findings


def test_an_exception_inside_closes_it(instrumented):
    with pytest.raises(KernelFinding), emulator.instrument() as report:
        instrumented.launch("race", 1, 64, np.zeros(64, np.float32), shared_bytes=256)
    assert not emulator.is_instrumenting()
    assert [finding.kind for finding in report.findings] == ["race"]


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match=r"sm_52.*sm_90"), emulator.instrument(arch="sm_52"):
        pass
    with pytest.raises(ValueError, match="threads=-1"):
        emulator.configure(threads=-1)


def test_a_line_is_found_by_its_text_or_refused(instrumented):
    report = instrumented.launch("scale", 1, 32, ZEROS, ZEROS.copy(), 1.0, 8)
    assert report.line("out[i] = factor").counters.global_store_requests == 1
    with pytest.raises(LookupError, match="0 counted lines contain 'nowhere'"):
        report.line("nowhere")


# ---- long launches

CALL = """
import sys
import numpy as np
from flash_tutorial import emulator

module = emulator.compile(open(sys.argv[1]).read(), instrumented=False)
out = np.zeros(64 * 256, np.float32)
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "kernels.cu"
    path.write_text(SOURCE)
    return path


def test_ctrl_c_stops_a_launch_and_leaves_the_process_usable(module, source):
    program = CALL + textwrap.dedent("""
        print("launching", flush=True)
        try:
            module.launch("spin", 256, 64, out, 1_000_000_000)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        module.launch("spin", 256, 64, out, 3)
        print("usable", out[:64].tolist() == [x / 8 + 1.75 for x in range(64)])
    """)
    command = [sys.executable, "-c", program, str(source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "launching\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        assert process.stdout.readline() == "interrupted\n"
        assert time.monotonic() - sent < 2
        out, err = process.communicate(timeout=30)
    assert (out, err, process.returncode) == ("usable True\n", "", 0)


def test_ctrl_c_in_this_process(module):
    handler = signal.getsignal(signal.SIGINT)
    out = np.zeros(64 * 256, np.float32)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with emulator.instrument() as report, pytest.raises(KeyboardInterrupt):
        module.launch("spin", 256, 64, out, 1_000_000_000)
    timer.join()
    assert signal.getsignal(signal.SIGINT) is handler
    (launch,) = report.launches
    assert launch.blocks_run < launch.blocks_total == 256
    assert report.findings == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_bar_appears_on_a_terminal_when_it_takes_long(module, monkeypatch):
    monkeypatch.setattr(emulator, "PROGRESS_BAR_AFTER", 0.2)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    terminal, log = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    out = np.zeros(64 * 256, np.float32)
    module.launch("spin", 4, 64, out, 10)
    assert terminal.getvalue() == ""
    rounds = 1000
    while not terminal.getvalue() and rounds < 10**8:  # however fast this machine is
        rounds *= 4
        module.launch("spin", 256, 64, out, rounds)
    assert "emulating" in terminal.getvalue() and "/256" in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", log)
    module.launch("spin", 256, 64, out, rounds)
    assert log.getvalue() == ""


def test_launches_from_several_threads_keep_their_reports_apart(instrumented):
    reports = {}

    def work(blocks: int) -> None:
        for _ in range(20):
            out = np.zeros(32 * blocks, np.float32)
            reports[blocks] = instrumented.launch("spin", blocks, 32, out, 5)

    threads = [threading.Thread(target=work, args=(blocks,)) for blocks in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {blocks: report.totals.barriers for blocks, report in reports.items()} == {1: 5, 2: 10, 3: 15}


def test_many_launches_do_not_leak(instrumented):
    out = np.zeros(64, np.float32)

    def launch(times: int) -> None:
        for _ in range(times):
            instrumented.launch("race", 1, 64, out, shared_bytes=256, raise_on_finding=False)
            instrumented.launch("scale", 4, 16, ZEROS, out, 1.0, 8)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    launch(100)
    files, threads = descriptors(), threading.active_count()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    launch(500)
    assert (descriptors(), threading.active_count()) == (files, threads)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 4096  # KiB
