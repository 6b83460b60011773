"""`flash-tutorial bench`: who is measured on what, how often, what is kept, and what the tables say. The clock and the
GPU are pretended, all else is real: kernels run in the emulator, references on the CPU."""

import csv
import io
import json
import re
import sys
import types
from functools import partial

import command
import pytest
import torch

import flash_tutorial as ft
from flash_tutorial import benchmark, build, clock, ops, reference, results, timetable
from flash_tutorial.benchmark import plan_of
from flash_tutorial.suites import SUITES, Shape

GPU = {"name": "NVIDIA Test 1", "driver_version": "1.0"}
TINY = {"batch": 1, "heads": 2, "head_dims": (32,), "seqs": (8,)}
FLOAT32 = [version.name for version in ft.versions() if "float32" in version.dtypes]
HALF = [version.name for version in ft.versions() if "bfloat16" in version.dtypes]


call = partial(command.call, "bench")
refused = partial(command.refused, "bench")


def names(contenders):
    return [each.name for each in contenders]


# ---------------------------------------------------------------------------------------------- a pretended GPU


class Pretended:
    """A GPU whose calls take what `seconds` says (by contender; "": any other), on a clock of its own.

    Its do_bench is Triton's in all that counts: five calls to estimate, milliseconds to repetitions, one sample each.
    """

    def __init__(self):
        self.now = 0.0
        self.seconds = {"": 1e-4}
        self.calls: list[str] = []
        self.samples: list[str] = []
        self.before_sample = lambda name: None

    def captured(self, function, pool=None):
        function()  # what cannot be run cannot be captured
        name = self.name_of(function)

        def replay():
            self.calls.append(name)
            self.now += self.seconds.get(name, self.seconds[""])

        replay.contender = name
        return replay

    @staticmethod
    def name_of(function) -> str:
        """Of a version: its label."""
        return getattr(next(iter(getattr(function, "args", ())), None), "label", "")

    def do_bench(self, replay, warmup, rep, return_mode):
        assert return_mode == "all" and warmup == 0
        name, flush = replay.contender, 1e-4
        each = 1e3 * (self.seconds.get(name, self.seconds[""]) + flush)
        for _ in range(1 + 5 + 1):
            replay()
        count = max(1, int(rep / each))
        taken = []
        for index in range(count):
            self.before_sample(name)
            before = self.now
            replay()
            self.samples.append(name)
            taken.append(1e3 * (self.now - before) * (1 + 0.01 * (index % 3)))
        return taken


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A pretended GPU, which keeps its results in a folder of the test's."""
    pretended = Pretended()
    testing = types.ModuleType("triton.testing")
    testing.do_bench = pretended.do_bench
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.testing", testing)
    monkeypatch.setattr(clock, "_captured", pretended.captured)
    monkeypatch.setattr(clock, "_synchronize", lambda: None)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: pretended.now)
    monkeypatch.setattr(clock, "ceilings", lambda dtypes: {"tflops": dict.fromkeys(dtypes, 50.0), "copy_tb_s": 4.0})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU["name"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 8 * 2**30))
    monkeypatch.setattr(results, "environment", lambda: dict(GPU))
    monkeypatch.setattr(results, "gpu_state", lambda: "1980 MHz, 500 W, 50, P0")
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")

    randn, generator = torch.randn, torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    monkeypatch.setattr(torch, "randn", lambda *size, device=None, **more: randn(*size, **more))
    return pretended


def measured(*arguments, **options):
    plan = plan_of(*arguments, **{"only": True, **TINY, **options})
    return benchmark.measure(plan, progress=False)


def by_name(run, seq=8):
    return {row["version"]: row for row in run.rows if row["seq"] == seq}


# ---------------------------------------------------------------------------------------------- problems


def test_flops_of_both_products_and_half_of_them_when_causal():
    shape = Shape(4, 12, 512, 64)
    assert shape.flops == 4 * 4 * 12 * 512 * 512 * 64 == 2 * Shape(4, 12, 512, 64, causal=True).flops


def test_a_row_leads_back_to_its_problem():
    shape = Shape(4, 12, 512, 64, "bfloat16", True, 3)
    row = {"version": "v05", **benchmark.dataclasses.asdict(shape), "tflops": 1.0}
    assert Shape.of(row) == shape
    del row["kv_heads"]  # rows of the first runs have none
    assert Shape.of(row).kv_heads == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 12, "kv_heads": 5}, "heads is 12 and kv_heads 5"),
        ({"batch": 0}, "batch is 0: it has to be a whole number, 1 or more"),
        ({"seqs": (512, 0)}, "seq is 0"),
        ({"dtype": "float8"}, "dtype is 'float8': accepted are float32, float16, bfloat16"),
        (
            {"suite": "papers"},
            "unknown suite 'papers': did you mean paper? There are small, pedagogical, article, blog",
        ),
        ({"suite": "blog", "seqs": (1000,)}, "length 1000 does not divide 16,384, which batch size times length is"),
        ({"suite": "paper", "head_dims": (48,)}, "head_dim 48 does not divide 2,048, which heads times head_dim is"),
        ({"suite": "blog", "seqs": (32768,)}, "say --batch-size too"),
    ],
)
def test_a_problem_that_is_none_is_refused(options, message):
    with pytest.raises(ValueError) as refusal:
        plan_of(["baseline"], peers=(), **{"suite": "pedagogical", **options})
    assert message in str(refusal.value)


def grid(suite, **chosen):
    return [
        (shape.batch, shape.heads, shape.seq, shape.head_dim, shape.dtype, shape.causal)
        for shape in plan_of(["baseline"], suite, peers=(), **chosen).shapes
    ]


def test_the_suites_are_these_grids():
    doubled = (512, 1024, 2048, 4096, 8192, 16384)
    assert grid("pedagogical") == [(4, 12, n, 64, "float32", False) for n in (512, 1024, 2048)]
    assert grid("article") == [(1, 32, n, 128, "float16", True) for n in doubled[:-1]]
    assert grid("blog") == [(16384 // n, 16, n, 128, "bfloat16", False) for n in doubled]
    assert grid("paper") == [
        (16384 // n, 2048 // d, n, d, "bfloat16", causal)
        for d in (64, 128)
        for causal in (False, True)
        for n in doubled
    ]
    assert sorted(SUITES) == ["article", "blog", "paper", "pedagogical", "small"]


def test_small_has_the_dtypes_of_the_versions_named():
    both = plan_of([FLOAT32[0], HALF[0]], peers=())
    assert {shape.dtype for shape in both.shapes} == {"float32", "float16"}
    assert [shape.seq for shape in both.shapes] == [512, 1024] * 2
    assert {shape.dtype for shape in plan_of([FLOAT32[0]], peers=()).shapes} == {"float32"}
    first, second = both.contenders[:2]
    assert [first.takes(shape) for shape in both.shapes] == [True, True, False, False]
    assert [second.takes(shape) for shape in both.shapes] == [False, False, True, True]


def test_options_change_a_suites_problems():
    assert grid("blog", batch=2, seqs=(100,), head_dims=(64,)) == [(2, 32, 100, 64, "bfloat16", False)]
    assert grid("paper", causals=(True,), head_dims=(128,), seqs=(512,)) == [(32, 16, 512, 128, "bfloat16", True)]
    assert grid("article", dtype="bfloat16", heads=8, seqs=(64,)) == [(1, 8, 64, 128, "bfloat16", True)]


# ---------------------------------------------------------------------------------------------- who takes part


def test_yardsticks_and_installed_packages_run_beside(monkeypatch):
    monkeypatch.setattr(reference.Peer, "installed", property(lambda self: self.module == "xformers.ops"))
    plan = plan_of(["v03", "v04:pad=0"], "pedagogical")
    beside = ["baseline", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math", "xformers"]
    assert names(plan.contenders) == ["v03_warp_local", "v04_vectorized:pad=0", *beside]
    assert plan.baseline == "baseline"
    only = plan_of(["v03", "v04"], "pedagogical", only=True)
    assert names(only.contenders) == ["v03_warp_local", "v04_vectorized"] and only.baseline == "v03_warp_local"


def test_a_baseline_takes_part():
    plan = plan_of(["v03"], "pedagogical", only=True, baseline="v04")
    assert names(plan.contenders) == ["v03_warp_local", "v04_vectorized"] and plan.baseline == "v04_vectorized"


def test_all_leaves_out_what_takes_another_dtype_and_says_so():
    plan = plan_of(suite="blog", peers=())
    assert [each.name for each in plan.contenders if each.version] == HALF
    assert list(plan.left_out) == [name for name in FLOAT32 if name not in HALF]
    assert plan.left_out[FLOAT32[0]] == "takes float32, head_dim 1 to 128"


@pytest.mark.parametrize(
    ("asked", "options", "message"),
    [
        (["v03"], {"suite": "blog"}, "dtype is bfloat16: v03_warp_local takes float32; bfloat16: v05"),
        (["v03"], {"head_dims": (200,)}, "head_dim is 200: v03_warp_local takes 1 to 128"),
        (["all"], {"head_dims": (200,)}, "no version takes float32 with head_dim 200"),
        (["v0x"], {}, "unknown version 'v0x'"),
        (["v0x"], {}, "other packages' are flash_attn, flash_attn_3, flash_attn_4, xformers"),
        (["sdpa_flas"], {}, "unknown name 'sdpa_flas': did you mean sdpa_flash"),
        (["xformer"], {}, "did you mean xformers?"),
        (["v04:padding=0"], {}, "v04_vectorized has no option 'padding'"),
        (["v03", "warp_local"], {}, "v03_warp_local comes twice"),
        (["sdpa", "sdpa"], {}, "sdpa comes twice"),
        (["v03"], {"baseline": "nothing"}, "unknown version 'nothing'"),
        (["nowhere/my_v03.cu"], {}, "there is no kernel file 'nowhere/my_v03.cu'"),
    ],
)
def test_who_cannot_take_part_is_refused(asked, options, message):
    with pytest.raises(ValueError) as refusal:
        plan_of(asked, peers=(), **options)
    assert message in str(refusal.value)


# ---------------------------------------------------------------------------------------------- counts


def test_repetitions_and_warm_up_are_counts(gpu):
    plan = plan_of(["v00", "v03"], only=True, **TINY)
    run = benchmark.measure(plan, warmup=7, repetitions=31, progress=False)
    for name, row in by_name(run).items():
        assert (row["warmup"], row["repetitions"]) == (7, 31)
        assert gpu.calls[:7] == ["v00_naive"] * 7 and gpu.calls.count(name) > 31 + 7
        assert row["microseconds"]["p20"] <= row["microseconds"]["median"] <= row["microseconds"]["p80"]
        assert row["gpu_state"] == "1980 MHz, 500 W, 50, P0"


@pytest.mark.parametrize("seconds", [3e-6, 2e-4, 3e-2, 0.5, 20.0])
@pytest.mark.parametrize("repetitions", [1, 2, 10, 31])
def test_a_stopwatch_takes_exactly_as_many_as_asked_for(gpu, seconds, repetitions):
    gpu.seconds[""] = seconds
    watch = clock.Stopwatch(lambda: None)
    watch.warm(2)
    for turn, taken in enumerate(clock.turns(repetitions)):
        watch.take(taken)
        assert len(watch.milliseconds) == sum(clock.turns(repetitions)[: turn + 1])
    assert len(watch.milliseconds) == repetitions and watch.warmed == 2
    assert watch.timing.median == pytest.approx(1e6 * seconds, rel=0.03)
    assert watch.timing.spread <= 0.02
    assert len(gpu.samples) <= max(5 * repetitions, 60), "about as many as needed"


def test_turns_add_up():
    assert clock.turns(30) == [10, 10, 10] and clock.turns(5) == [2, 2, 1] and clock.turns(1) == [1, 0, 0]


def test_contenders_take_turns(gpu):
    measured(["v00", "v03", "v04"])
    order = [name[:3] for name, after in zip(gpu.samples, [*gpu.samples[1:], None]) if name != after]
    assert order == ["v00", "v03", "v04", "v03", "v04", "v00", "v04", "v00", "v03"]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 18])
def test_every_turn_has_everyone_and_begins_where_a_third_is_done(count):
    names = [f"v{index:02}" for index in range(count)]
    orders = [clock.order(names, turn) for turn in range(clock.ROUNDS)]
    assert orders[0] == names and all(sorted(each) == names for each in orders)
    assert [each[0] for each in orders] == [names[count * turn // 3] for turn in range(3)]


def test_measure_times_functions_side_by_side(gpu):
    timings = clock.measure({"a": lambda: None, "b": lambda: None})
    assert list(timings) == ["a", "b"] and timings["a"].median == pytest.approx(100, rel=0.03)


def test_a_slow_contender_does_not_take_minutes(gpu):
    gpu.seconds |= {"v00_naive": 2.0, "v03_warp_local": 15.0}
    run = measured(["v00", "v03", "v04"])
    rows = by_name(run)
    assert rows["v00_naive"]["repetitions"] == 5 and rows["v00_naive"]["warmup"] == 1
    assert "a call takes about 15 s: --repetitions times it anyway" in rows["v03_warp_local"]["failed"]
    assert rows["v04_vectorized"]["repetitions"] == clock.REPETITIONS
    assert gpu.now < 60


def test_counts_that_are_asked_for_are_kept_however_long_they_take(gpu):
    gpu.seconds[""] = 15.0
    run = benchmark.measure(plan_of(["v03"], only=True, **TINY), warmup=2, repetitions=4, progress=False)
    assert (run.rows[0]["warmup"], run.rows[0]["repetitions"]) == (2, 4)


def test_ceilings_are_of_a_product_and_a_copy(monkeypatch):
    def product(dtype):
        if dtype == "float16":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return lambda: None

    monkeypatch.setattr(clock, "_copy", lambda: lambda: None)
    monkeypatch.setattr(clock, "_product", product)
    monkeypatch.setattr(clock, "measure", lambda functions: {"": clock.Timing(2000.0, 1999.0, 2001.0)})
    found = clock.ceilings(["bfloat16", "float16", "bfloat16"])
    assert found == {"tflops": {"bfloat16": round(2 * 8192**3 / 2e-3 / 1e12, 2)}, "copy_tb_s": round(2**31 / 2e9, 3)}


# ---------------------------------------------------------------------------------------------- running


def test_a_row_says_what_was_measured(gpu):
    run = measured(["v04:pad=0", "sdpa_math"], causals=(True,), kv_heads=1)
    variant, other = run.rows
    assert variant["version"] == "v04_vectorized:pad=0"
    assert Shape.of(variant) == Shape(1, 2, 8, 32, "float32", True, 1)
    assert variant["kernel_hash"] == results.kernel_hash("v04:pad=0") != results.kernel_hash("v04")
    assert variant["tflops"] == pytest.approx(
        Shape.of(variant).flops / variant["microseconds"]["median"] / 1e6, abs=0.005
    )
    assert 0 < variant["error"] < 1e-5
    assert other["version"] == "sdpa_math" and "kernel_hash" not in other
    assert run.ceilings == {"tflops": {"float32": 50.0}, "copy_tb_s": 4.0}


@pytest.fixture
def wrong_v03(monkeypatch):
    def attention(q, k, v, *, version, **options):
        out, lse = right(q, k, v, version=version, **options)
        return (out * 2 if version.name == "v03_warp_local" else out), lse

    right = ops.attention
    monkeypatch.setattr(ops, "attention", attention)


def test_a_wrong_contender_gets_no_time(gpu, wrong_v03):
    rows = by_name(measured(["v03", "v04"]))
    assert "microseconds" not in rows["v03_warp_local"] and "instead of" in rows["v03_warp_local"]["wrong"]
    assert "microseconds" in rows["v04_vectorized"] and "v03_warp_local" not in gpu.calls


def test_a_wrong_lse_is_wrong(gpu, monkeypatch):
    def attention(*tensors, **options):
        out, lse = right(*tensors, **options)
        return out, lse + 1

    right = ops.attention
    monkeypatch.setattr(ops, "attention", attention)
    assert measured(["v03"]).rows[0]["wrong"].startswith("lse[")


def test_one_without_memory_says_so_and_the_others_go_on(gpu, monkeypatch):
    def attention(*tensors, version, **options):
        if version.name == "v03_warp_local":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 17 GiB")
        return right(*tensors, version=version, **options)

    right = ops.attention
    monkeypatch.setattr(ops, "attention", attention)
    rows = by_name(measured(["v03", "v04"], seqs=(8, 16)))
    assert rows["v03_warp_local"]["failed"] == "out of memory: NVIDIA Test 1 has 8 GiB"
    assert "microseconds" in rows["v04_vectorized"]


@pytest.mark.parametrize("step", ["_captured", "do_bench"])
def test_one_that_fails_while_it_is_timed_says_so_and_the_others_go_on(gpu, monkeypatch, step):
    def fail(name):
        if name == "v03_warp_local":
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    if step == "_captured":
        captured = gpu.captured
        monkeypatch.setattr(clock, step, lambda f, pool: [fail(gpu.name_of(f)), captured(f, pool)][1])
    else:
        gpu.before_sample = fail
    rows = by_name(measured(["v03", "v04"]))
    assert "RuntimeError: CUDA error: operation not permitted" in rows["v03_warp_local"]["failed"]
    assert "microseconds" not in rows["v03_warp_local"] and rows["v04_vectorized"]["repetitions"] == clock.REPETITIONS


def test_results_that_cannot_be_checked_get_no_time(gpu, monkeypatch):
    def judge(q, *more):
        if q.shape[2] == 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(q, *more)

    right = reference.Judge
    monkeypatch.setattr(reference, "Judge", judge)
    run = measured(["v03"], seqs=(16, 8))
    assert "cannot be checked: out of memory" in by_name(run, 16)["v03_warp_local"]["failed"]
    assert "microseconds" in by_name(run, 8)["v03_warp_local"]


def test_what_runs_beside_is_left_out_where_it_is_not_supported(gpu):
    run = measured(["v03"], only=False, peers=())
    assert set(by_name(run)) == {"v03_warp_local", "baseline", *REFERENCES_ON_CPU}
    assert "does not support this input (float32 on cpu)" in run.left_out["sdpa_cudnn"]
    named = measured(["sdpa_cudnn"])
    assert "does not support this input" in named.rows[0]["failed"] and not named.left_out


def on_cpu(name: str) -> bool:
    try:
        reference.REFERENCES[name](*torch.zeros(3, 1, 1, 4, 32))
    except NotImplementedError:
        return False
    return True


REFERENCES_ON_CPU = [name for name in benchmark.YARDSTICKS if on_cpu(name)]


def test_a_package_that_cannot_be_imported_is_a_row_that_says_why(gpu, monkeypatch, tmp_path):
    (tmp_path / "flash_attn_interface.py").write_text("raise OSError('undefined symbol: _ZN2at')")
    monkeypatch.syspath_prepend(tmp_path)
    plan = plan_of(["v03"], **TINY)
    assert "flash_attn_3" in names(plan.contenders)
    run = benchmark.measure(plan, progress=False)
    why = "ImportError: flash_attn_interface cannot be imported: OSError: undefined symbol"
    assert why in by_name(run)["flash_attn_3"]["failed"]
    assert benchmark.right(plan, run), "nobody asked for it"


def test_a_package_that_is_there_takes_part(gpu, monkeypatch):
    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_func = lambda q, k, v, softmax_scale, causal: reference.attention_same_precision(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal, softmax_scale
    )[0].transpose(1, 2)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    rows = by_name(benchmark.measure(plan_of([HALF[0]], **TINY), progress=False))
    assert rows["flash_attn_3"]["microseconds"] and rows["flash_attn_3"]["error"] < 1e-2


# ---------------------------------------------------------------------------------------------- interrupted


def interrupt_at(gpu, number):
    seen = []

    def count(name):
        seen.append(name)
        if len(seen) == number:
            raise KeyboardInterrupt

    gpu.before_sample = count


def test_an_interrupted_run_keeps_what_was_measured(gpu):
    gpu.seconds[""] = 2e-3  # do_bench then takes no more than it is asked for
    per_shape = 2 * clock.REPETITIONS
    interrupt_at(gpu, per_shape + 15)
    run = measured(["v03", "v04"], seqs=(8, 16, 24))
    assert run.interrupted
    assert {name: row["repetitions"] for name, row in by_name(run, 8).items()} == {
        "v03_warp_local": 30,
        "v04_vectorized": 30,
    }
    assert {name: row["repetitions"] for name, row in by_name(run, 16).items()} == {"v03_warp_local": 10}
    assert not by_name(run, 24)


def test_interrupting_the_command_shows_and_keeps_it(gpu):
    gpu.seconds[""] = 2e-3
    interrupt_at(gpu, 2 * clock.REPETITIONS + 1)
    result = call("v03", "v04", "--only", *SMALL, "--seq-lens", "8,16")
    assert result.exit_code == 130
    assert "interrupted: this is what was measured until then" in result.stderr
    (kept,) = results.runs("times")
    assert kept["interrupted"] and [row["seq"] for row in kept["rows"]] == [8, 8]
    assert "v04_vectorized" in result.stdout and "16 " not in result.stdout


def test_interrupted_before_anything_was_measured(gpu, monkeypatch):
    def interrupt(dtypes):
        raise KeyboardInterrupt

    monkeypatch.setattr(clock, "ceilings", interrupt)
    result = call("v03", *SMALL)
    assert (result.exit_code, result.stdout) == (130, "") and "nothing measured" in result.stderr
    assert not results.runs("times")


# ---------------------------------------------------------------------------------------------- keeping


def test_a_run_is_kept_with_its_environment_and_ceilings(gpu):
    path = benchmark.save(measured(["v03", "sdpa_math"]))
    assert path == results.RESULTS / "test_1.json"
    (run,) = json.loads(path.read_text())["runs"]
    assert run["environment"] == GPU and run["ceilings"]["copy_tb_s"] == 4.0 and "interrupted" not in run
    assert benchmark.stored()[0]["run"]["ceilings"] == run["ceilings"]
    assert {row["version"]: row["stale"] for row in benchmark.stored()} == {"v03_warp_local": False, "sdpa_math": False}


def test_failures_and_readers_own_files_are_not_kept(gpu, tmp_path, monkeypatch):
    own = tmp_path / "v03_warp_local.cu"
    own.write_text(ft.version("v03").source.read_text() + "// mine\n")
    run = measured([own, "v03", "sdpa_cudnn"])
    assert names_of(run) == {"v03_warp_local.cu", "v03_warp_local", "sdpa_cudnn"}
    monkeypatch.chdir(tmp_path)  # where the file's name leads to it
    benchmark.save(run)
    assert [row["version"] for row in benchmark.stored()] == ["v03_warp_local"]


def names_of(run):
    return {row["version"] for row in run.rows}


def test_a_variant_of_a_readers_own_file_is_not_kept(gpu, tmp_path):
    own = tmp_path / "v04_vectorized.cu"
    own.write_text(ft.version("v04").source.read_text() + "// mine\n")
    run = measured([f"{own}:pad=0"])
    assert names_of(run) == {"v04_vectorized:pad=0"} and "microseconds" in run.rows[0]
    with pytest.raises(ValueError, match="no result of a version, a variant or a reference"):
        benchmark.save(run)


def test_a_row_of_a_kernel_that_has_changed_since_is_stale(gpu, monkeypatch):
    benchmark.save(measured(["v03", "v04", "sdpa_math"]))
    hash_of = build.source_hash
    monkeypatch.setattr(
        build, "source_hash", lambda version: "changed" if version.name.startswith("v03") else hash_of(version)
    )
    assert {row["version"]: row["stale"] for row in benchmark.stored()} == {
        "v03_warp_local": True,
        "v04_vectorized": False,
        "sdpa_math": False,
    }
    text = call("v03", "v04", "sdpa_math", "--only", "--stored", *SMALL).stdout
    assert "v03_warp_local* " in text and "v04_vectorized " in text and "sdpa_math " in text
    assert "*: stale, measured before the kernel's last change" in text


def test_an_error_that_is_no_number_is_kept_as_none(gpu, monkeypatch):
    right = ops.attention
    monkeypatch.setattr(ops, "attention", lambda *a, **o: [x * float("nan") for x in right(*a, **o)])
    run = measured(["v03"])
    assert run.rows[0]["error"] is None and "nan instead of" in run.rows[0]["wrong"]
    json.loads(benchmark.save(run).read_text(), parse_constant=lambda name: pytest.fail(name))


def test_the_first_runs_can_be_read():
    rows = benchmark.stored()
    assert rows and all(Shape.of(row).flops and row["gpu"] for row in rows)


@pytest.fixture
def rows_of(tmp_path):
    """Writes runs of {(contender, length): µs}, oldest first, and tells what of them is taken."""

    def taken(*runs, plan=None, changed=()):
        written = [
            {
                "date": f"2026-01-0{day}T00:00:00+00:00",
                "environment": GPU,
                "rows": [
                    row(name, seq, median) | {"kernel_hash": results.kernel_hash(name) if day not in changed else "old"}
                    for (name, seq), median in run.items()
                ],
            }
            for day, run in enumerate(runs, 1)
        ]
        document = {"format": results.FORMAT, "gpu": GPU["name"], "runs": written}
        (tmp_path / "test_1.json").write_text(json.dumps(document))
        found = benchmark.stored(plan, folder=tmp_path)
        return {(each["version"], each["seq"]): each["microseconds"]["median"] for each in found}

    return taken


V03, V04 = "v03_warp_local", "v04_vectorized"


def test_a_newer_run_of_fewer_lengths_leaves_a_table_whole(rows_of):
    whole = {(V03, 512): 20.0, (V03, 1024): 21.0}
    assert rows_of(whole, {(V03, 512): 10.0}) == whole
    newer = {(V03, 512): 10.0, (V03, 1024): 11.0}
    assert rows_of(whole, newer) == newer
    assert rows_of(whole, {(V03, 512): 10.0, (V04, 512): 5.0}) == whole | {(V04, 512): 5.0}
    assert rows_of(whole, {(V03, 2048): 30.0}) == whole | {(V03, 2048): 30.0}


def test_a_plans_contenders_are_of_the_run_that_has_the_most_of_them(rows_of):
    both, alone = {(V03, 512): 20.0, (V04, 512): 15.0}, {(V03, 512): 10.0, (V03, 1024): 11.0}
    plan = plan_of([V03, V04], batch=4, heads=12, head_dims=(64,), seqs=(512,), dtype="float32", only=True)
    assert rows_of(both, alone, plan=plan) == both
    assert rows_of(both, alone) == both | alone
    longer = plan_of([V03, V04], batch=4, heads=12, head_dims=(64,), seqs=(512, 1024), dtype="float32", only=True)
    assert rows_of(both, alone, plan=longer) == both | alone


def test_a_kernel_that_has_changed_since_counts_last(rows_of):
    whole, newer = {(V03, 512): 20.0, (V03, 1024): 21.0}, {(V03, 512): 10.0}
    assert rows_of(whole, newer, changed=[1]) == whole | newer
    assert rows_of(newer, whole, changed=[2]) == whole | newer


# ---------------------------------------------------------------------------------------------- tables


def row(name, seq=512, median=100.0, spread=0.0, gpu="NVIDIA Test 1", dtype="float32", ceiling=50.0, **more):
    shape = Shape(4, 12, seq, 64, dtype)
    times = {"median": median, "p20": median * (1 - spread), "p80": median * (1 + spread)}
    return {
        "version": name,
        **benchmark.dataclasses.asdict(shape),
        "error": 1e-7,
        "microseconds": times,
        "tflops": shape.flops / median / 1e6,
        "warmup": 5,
        "repetitions": 30,
        "gpu": gpu,
        "date": "2026-01-02T03:04:05+00:00",
        "stale": False,
        "run": {"ceilings": {"tflops": {dtype: ceiling}, "copy_tb_s": 4.0}} if ceiling else {},
        **more,
    }


def untimed(*arguments, **more):
    made = row(*arguments, **more)
    del made["microseconds"]
    return made


def tables(rows, *asked, baseline="baseline", **options):
    plan = plan_of(asked, "pedagogical", baseline=baseline, peers=(), **options)
    return timetable.tables_of(rows, plan.contenders, plan.baseline)


def test_a_line_stands_beside_the_baseline():
    (table,) = tables([row("v04_vectorized", median=50.0, spread=0.02), row("baseline", median=100.0)], "v04")
    line, base = table.lines
    assert (line.microseconds, line.ratio, line.delta) == (50.0, 2.0, -0.5)
    assert line.spread == pytest.approx(0.02) and not line.noise
    assert line.tflops == pytest.approx(4 * 48 * 512**2 * 64 / 50e-6 / 1e12)
    assert line.share == pytest.approx(line.tflops / 50.0)
    assert (base.ratio, base.delta, base.noise) == (1.0, 0.0, False)
    assert table.means == pytest.approx({"v04_vectorized": line.tflops, "baseline": base.tflops})


@pytest.mark.parametrize(("own", "base", "noise"), [(0.0, 0.0, False), (0.02, 0.0, True), (0.0, 0.02, True)])
def test_a_difference_within_either_spread_is_noise(own, base, noise):
    (table,) = tables([row("v04_vectorized", median=101.0, spread=own), row("baseline", spread=base)], "v04")
    assert table.lines[0].noise is noise
    text = timetable.render([table])
    assert ("noise    " in text) is noise and ("+1.0" in text) is not noise


def test_without_a_baseline_there_is_nothing_to_compare_with():
    (table,) = tables([row("v04_vectorized"), untimed("baseline", failed="out of memory")], "v04")
    line = table.lines[0]
    assert line.ratio is None and line.delta is None and not line.noise and table.mean_ratio("v04_vectorized") is None
    assert "baseline failed at N=512: out of memory" in timetable.render([table])


def test_rows_of_several_runs_are_told():
    rows = [row("v04_vectorized"), row("baseline", date="2026-02-03T03:04:05+00:00")]
    text = timetable.render(tables(rows, "v04"))
    assert "measured 2026-01-02, 2026-02-03" in text and "measured in several runs" in text
    assert "several runs" not in timetable.render(tables(rows[:1], "v04"))


def test_rows_without_ceilings_have_no_share():
    (table,) = tables([row("v04_vectorized", ceiling=None)], "v04")
    assert table.lines[0].share is None and "ceilings" not in timetable.render([table])


def test_the_harmonic_mean_is_over_the_lengths_that_the_others_have_too():
    rows = [row("v04_vectorized", n, median) for n, median in ((512, 100), (1024, 400), (2048, 3200))]
    rows += [row("baseline", n, median) for n, median in ((512, 100), (1024, 200))]
    rows.append(untimed("baseline", 2048, failed="out of memory"))
    (table,) = tables(rows, "v04")
    speeds = [line.tflops for line in table.lines if line.contender.name == "v04_vectorized"]
    assert table.means == {"v04_vectorized": pytest.approx(3 / sum(1 / speed for speed in speeds))}
    assert table.mean_ratio("v04_vectorized") is None


def test_one_command_gives_the_kernel_by_kernel_table():
    """Percent of a reference at N=4,096, and of the harmonic mean over all lengths."""
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    plan = plan_of([HALF[0]], "blog", baseline="sdpa_flash", peers=())
    rows = [
        {**row(name, dtype="bfloat16", median=median), **benchmark.dataclasses.asdict(shape), "tflops": 0.0}
        for shape in plan.shapes
        for name, median in ((HALF[0], 400.0 if shape.seq == 4096 else 200.0), ("sdpa_flash", 100.0))
    ]
    made = timetable.tables_of(rows, plan.contenders, plan.baseline)
    assert len(made) == 1 and made[0].problem == "bfloat16, B·N=16,384, H=16, D=128, full"
    lines = timetable.render(made).partition("Speed in % of sdpa_flash")[2].splitlines()
    header = next(line for line in lines if line.startswith("version")).split()
    assert header == ["version", *map(str, lengths), "h.", "mean", "in", "%"]
    cells = next(line for line in lines if line.startswith(HALF[0])).split()
    flops = [shape.flops for shape in plan.shapes]
    taken = [400.0 if n == 4096 else 200.0 for n in lengths]
    inverse = [sum(t / f for t, f in zip(times, flops)) for times in (taken, [100.0] * 6)]
    assert cells[1:7] == ["50.0"] * 3 + ["25.0"] + ["50.0"] * 2
    assert cells[8] == f"{100 * inverse[1] / inverse[0]:.1f}"


def test_every_gpu_and_family_has_a_table():
    rows = [
        row("baseline"),
        row("baseline", 1024),
        row("baseline", gpu="NVIDIA Other"),
        row("baseline", dtype="float16"),
    ]
    made = tables(rows, "baseline")
    assert [(table.gpu, len(table.lines)) for table in made] == [
        ("NVIDIA Test 1", 2),
        ("NVIDIA Other", 1),
        ("NVIDIA Test 1", 1),
    ]
    assert made[0].lengths == [512, 1024]


@pytest.fixture
def some():
    rows = [row("v04_vectorized", n, median=n / 10, spread=0.01) for n in (512, 1024)]
    rows += [row("v04_vectorized:copies=scalar", n, median=n / 8) for n in (512, 1024)]
    rows += [row("baseline", n, median=n / 2) for n in (512, 1024)]
    rows += [untimed("v03_warp_local", 512, wrong="out[0, 1] is | 3 <instead> of 4")]
    return tables(rows, "v03", "v04", "v04:copies=scalar")


def test_a_terminal_of_100_columns_holds_it(some):
    everyone = [version.name for version in ft.versions()]
    long = "v04_vectorized:copies=scalar,index=64bit,inline=0,block_q=32,block_kv=32"
    rows = [row(name, n, median=123456.7) for name in (*everyone, long, "baseline") for n in (512, 1024, 2048)]
    rows += [row("sdpa_math", n, median=0.1) for n in (512, 1024, 2048)]
    plan = plan_of([long], "pedagogical", baseline="sdpa_math", peers=())
    for made in (some, timetable.tables_of(rows, plan.contenders, plan.baseline)):
        text = timetable.render(made, "simple", {"v05_tensor_core": "takes float16, bfloat16 " * 8})
        assert max(map(len, text.splitlines())) <= 100


def test_a_terminal_shows_every_column(some):
    text = timetable.render(some)
    assert re.search(r"^ +N  version +title +µs +Δ % +TFLOP/s +% of +ratio +± %$", text, re.MULTILINE)
    (line,) = re.findall(r"^ 512  v04_vectorized  .*$", text, re.MULTILINE)
    assert line.split() == ["512", "v04_vectorized", "Vectorized", "51.2", "−80.0", "62.91", "125.8", "5.000", "1.0"]
    assert re.search(r"^ 512  v04:copies=scalar ", text, re.MULTILINE)
    assert ft.version("v04").idea[:30] in text
    assert "median of 30 after 5 to warm up" in text and "50 TFLOP/s (product), 4 TB/s (copy)" in text
    assert "v03_warp_local wrong at N=512: out[0, 1] is | 3 <instead> of 4" in text


def test_markdown_and_html_have_the_descriptions(some):
    markdown, page = timetable.render(some, "github"), timetable.render(some, "html")
    for text in (markdown, page):
        assert ft.version("v04").idea in text and "v04_vectorized:copies=scalar" in text and "description" in text
    assert len({line.count("|") for line in markdown.splitlines() if line.startswith("| ") and "51.2" in line}) == 1
    assert "&lt;instead&gt;" in page and "<instead>" not in page


def test_csv_and_json_have_the_figures(some):
    first = next(csv.DictReader(io.StringIO(timetable.render(some, "csv"))))
    assert first["version"] == "v03_warp_local" and "<instead>" in first["note"] and first["microseconds"] == ""
    data = json.loads(timetable.render(some, "json", {"v05": "takes float16"}))
    line = next(each for each in data["rows"] if each["version"] == "v04_vectorized" and each["seq"] == 1024)
    assert (line["microseconds"], line["ratio"], line["repetitions"]) == (102.4, 5.0, 30)
    assert line["harmonic_mean_ratio"] == pytest.approx(5.0) and line["baseline"] == "baseline"
    assert data["left_out"] == {"v05": "takes float16"} and data["runs"][0]["ceilings"]["copy_tb_s"] == 4.0


@pytest.mark.parametrize("ceilings", [{}, {"copy_tb_s": 4.0}, {"tflops": {}}])
def test_a_run_without_all_ceilings_is_shown(ceilings):
    text = timetable.render(tables([row("v04_vectorized", run={"ceilings": ceilings})], "v04"))
    assert ("unknown TFLOP/s (product)" in text) == bool(ceilings)


def test_json_has_the_run_of_every_gpu():
    rows = [row("v04_vectorized", gpu=gpu, run={"gpu": gpu}) for gpu in ("NVIDIA Test 1", "NVIDIA Test 2")]
    runs = json.loads(timetable.render(tables(rows, "v04"), "json"))["runs"]
    assert [run["gpu"] for run in runs] == ["NVIDIA Test 1", "NVIDIA Test 2"]


def test_an_unknown_format_is_refused(some):
    with pytest.raises(ValueError, match="format is 'pdf': accepted are simple, github, html, csv, json"):
        timetable.render(some, "pdf")


# ---------------------------------------------------------------------------------------------- the command

SMALL = ["--batch-size", "1", "--num-heads", "2", "--head-dim", "32", "--seq-lens", "8", "--dtype", "float32"]


def test_the_command_measures_shows_and_keeps(gpu):
    result = call("v03", "v04", *SMALL, "--seq-lens", "8,16", "--warmup", "3", "--repetitions", "9", "--causal")
    assert result.exit_code == 0, result.output
    assert "v04_vectorized" in result.stdout and "median of 9 after 3 to warm up" in result.stdout
    assert "sdpa_cudnn" in result.stdout.partition("left out: ")[2]
    assert f"kept in {results.RESULTS / 'test_1.json'}" in result.stderr
    rows = benchmark.stored()
    assert {row["seq"] for row in rows} == {8, 16} and all(row["causal"] for row in rows)
    shown = call("v03", "v04", *SMALL, "--seq-lens", "8,16", "--causal", "--stored", "--gpu", "test_1")
    assert shown.exit_code == 0 and shown.stdout.splitlines()[4:9] == result.stdout.splitlines()[4:9]


def test_nothing_is_kept_where_that_is_asked_for(gpu):
    result = call("v03", *SMALL, "--no-save", "--only")
    assert result.exit_code == 0 and not results.RESULTS.exists() and "kept" not in result.stderr


def test_a_wrong_version_gives_exit_status_1(gpu, wrong_v03):
    result = call("v03", "v04", *SMALL, "--only")
    assert result.exit_code == 1 and "v03_warp_local wrong at N=8: out[" in result.stdout
    assert "v03_warp_local" in {row["version"] for row in benchmark.stored()}


def test_what_cannot_be_kept_is_shown_all_the_same(gpu, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError("disk full")

    monkeypatch.setattr(results, "append", refuse)
    result = call("v03", *SMALL, "--only")
    assert result.exit_code == 1 and "v03_warp_local" in result.stdout and "not kept: disk full" in result.stderr


def test_a_damaged_results_file_is_refused_before_anything_is_measured(gpu):
    results.RESULTS.mkdir()
    (results.RESULTS / "test_1.json").write_text("{")
    assert "is damaged" in refused("v03", *SMALL)
    assert gpu.calls == [] and (results.RESULTS / "test_1.json").read_text() == "{"
    assert "is damaged" in refused("v03", *SMALL, "--stored")


def test_nothing_stored_is_said(gpu):
    result = call("v03", "--stored")
    assert (result.exit_code, result.stdout) == (1, "") and "nothing of this is stored" in result.stderr


@pytest.mark.parametrize(("name", "end"), [("v04:pad=9", "accepted are 4, 0"), ("x.cu", "no kernel file 'x.cu'")])
def test_what_no_name_was_meant_by_is_not_answered_with_names(name, end):
    assert refused(name).endswith(end)


def test_where_something_is_stored_is_said(gpu):
    shape = SUITES["pedagogical"].shapes()[0]
    results.append("times", [{"version": "v03_warp_local", **vars(shape)}], where=GPU)
    result = call("v03", "--stored")
    assert result.exit_code == 1 and "stored are times of --suite pedagogical\n" in result.stderr
    assert "stored are" not in call("v04", "--only", "--stored").stderr


def test_a_table_can_be_written_to_a_file(gpu, tmp_path):
    result = call("v03", *SMALL, "--only", "--out", tmp_path / "table.md")
    assert result.stdout == "" and "| v03_warp_local" in (tmp_path / "table.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do_instead():
    message = refused("v03")
    assert "needs a CUDA GPU" in message and "bench --stored" in message and "flash-tutorial compare" in message


def test_without_triton_it_says_so(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.testing", None)
    assert "timing needs Triton's do_bench" in refused("v03", *SMALL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["v0x"], "unknown version 'v0x'"),
        (["--suite", "blg"], "unknown suite 'blg': did you mean blog?"),
        (["v03", "--suite", "blog"], "v03_warp_local takes float32"),
        (["--seq-lens", "512,x"], "'512,x' is no list of lengths"),
        (["--seq-lens", "9" * 5000], "is no list of lengths: whole numbers of up to 18 digits"),
        (["--seq-lens", "0"], "seq is 0"),
        (["--repetitions", "0"], "0 is not in the range x>=1"),
        (["--warmup", "-1"], "-1 is not in the range x>=0"),
        (["--gpu", "h200"], "--gpu chooses among stored times: it needs --stored"),
        (["--stored", "--gpu", "b200"], "no times of a GPU 'b200' in results: those with times are h200"),
        (["--stored", "--repetitions", "3"], "--stored measures nothing"),
        (["--out", "nowhere/table.md"], "there is no directory nowhere"),
        (["--out", "table.pdf"], "ends in '.pdf'"),
    ],
)
def test_the_command_refuses(arguments, message):
    assert message in refused(*arguments)


# ---------------------------------------------------------------------------------------------- on a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
def test_measured_on_a_gpu(tmp_path):
    plan = plan_of(["v04", HALF[0]], batch=1, heads=2, seqs=(256,))
    run = benchmark.measure(plan, repetitions=7, progress=False)
    rows = {(row["version"], row["dtype"]): row for row in run.rows}
    for key in (("v04_vectorized", "float32"), (HALF[0], "float16"), ("baseline", "float16"), ("sdpa_math", "float32")):
        assert rows[key]["repetitions"] == 7 and rows[key]["microseconds"]["median"] > 0
    assert set(run.ceilings["tflops"]) == {"float32", "float16"} and run.ceilings["copy_tb_s"] > 0
    benchmark.save(run, tmp_path)
    assert benchmark.stored(plan, folder=tmp_path)[0]["gpu"] == torch.cuda.get_device_name()


@needs_gpu
def test_a_gpu_check_of_long_sequences_is_affordable():
    q, k, v = torch.randn(3, 1, 4, 16384, 64, device="cuda", dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    assert reference.Judge(q, k, v, causal=True)(reference.REFERENCES["sdpa_flash"](q, k, v, causal=True)).ok
    assert torch.cuda.max_memory_allocated() < 6 * 2**30
