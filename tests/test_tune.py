"""Tile shapes: measured on a pretended GPU, kept, shown, looked up, and handed to a kernel."""

import json
import re
import sys
import types
from dataclasses import asdict, replace
from functools import partial

import command
import pytest
import torch
from test_benchmark import GPU, Pretended

import flash_tutorial as ft
from flash_tutorial import build, clock, ops, reference, registry, results, tune
from flash_tutorial.suites import Shape
from flash_tutorial.versions import Option

# lse is the number of the tile shape that was taken, out the number of multiprocessors.
KERNEL = r"""
#include "flash/launch.cuh"

namespace {

constexpr int TILES = -1;

__global__ void attention_kernel(flash::Params params, int multiprocessors) {
    params.lse[blockIdx.x] = params.tiles;
    for (int d = 0; d < params.head_dim; ++d)
        static_cast<float*>(params.out)[int64_t(blockIdx.x) * params.head_dim + d] = multiprocessors;
}

int choose_tiles(const flash::Params& params) { return TILES >= 0 ? TILES : params.keys > 100 ? 2 : 0; }

void launch(const flash::Params& params, void* stream) {
    if (params.tiles < 0 || params.tiles > 2) throw std::runtime_error("there are tile shapes 0 to 2");
    flash::launch(attention_kernel, dim3(params.batch * params.heads * params.queries), dim3(1), 0, stream, params,
                  flash::sm_count());
}

}  // namespace

FLASH_REGISTER_TILED(launch, choose_tiles)
"""
WORDS = ("64x64", "64x32", "32x32")
TILES = Option("tiles", "TILES", (("auto", "-1"), *((word, str(i)) for i, word in enumerate(WORDS))), "tile shapes")


@pytest.fixture
def version(tmp_path, monkeypatch):
    """A version with three tile shapes, which goes by the name of v90 like one of the ladder."""
    path = tmp_path / "v90_tiled.cu"
    path.write_text(KERNEL)
    made = replace(ft.version("v02"), name="v90_tiled", own=path, options=(TILES,), strided=True)
    resolve = registry.resolve

    def resolved(name, like=None):
        word, colon, settings = str(name).partition(":")
        if word not in ("v90", "v90_tiled"):
            return resolve(name, like)
        return registry.variant(made, settings) if colon else made

    monkeypatch.setattr(registry, "resolve", resolved)
    return made


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where results are kept."""
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


# ---------------------------------------------------------------------------------------------- down to the kernel


def test_a_version_knows_its_tile_shapes(version):
    assert version.tiles == WORDS
    assert registry.resolve("v90:tiles=64x32").tiles == () == ft.version("v08").tiles
    assert registry.resolve("v90:tiles=auto").tiles == WORDS


@pytest.mark.parametrize(("asked", "taken"), [(-1, 0), (0, 0), (1, 1), (2, 2)])
def test_the_number_reaches_the_kernel_and_what_it_took_comes_back(version, asked, taken):
    q, k, v = torch.zeros(3, 1, 2, 5, 32)
    out, lse, number = registry.operator(version, "emulated")(q, k, v, False, 1.0, asked)
    assert (lse == taken).all() and number == taken
    assert (out == 132).all(), "the emulated GPU's multiprocessors"


def test_a_kernels_own_choice_is_made_for_each_problem(version):
    operator = registry.operator(version, "emulated")
    q, k = torch.zeros(1, 2, 5, 32), torch.zeros(1, 2, 101, 32)
    assert operator(q, k, k, False, 1.0)[2] == 2 and operator(q, q, q, False, 1.0)[2] == 0
    chosen = registry.operator(registry.resolve("v90:tiles=64x32"), "emulated")
    assert chosen(q, k, k, False, 1.0)[2] == 1, "a variant has made the choice"


@pytest.mark.parametrize(("number", "message"), [(3, "tile shapes 0 to 2"), (-2, "tiles: "), (2**31, "tiles: ")])
def test_a_number_that_there_is_not_is_refused(version, number, message):
    q = torch.zeros(1, 1, 4, 32)
    with pytest.raises(RuntimeError, match=message):
        registry.operator(version, "emulated")(q, q, q, False, 1.0, number)


def test_a_kernel_with_one_shape_says_so():
    q = torch.zeros(1, 1, 4, 32)
    assert registry.operator(ft.version("v02"), "emulated")(q, q, q, False, 1.0)[2] == -1


def test_attention_asks_for_what_was_looked_up(version, monkeypatch):
    asked = []

    def choice(version, operator, q, k, causal):
        asked.append((version.name, operator(q, k, k, causal, 1.0)[2], q.shape, k.shape, causal))
        return 1

    monkeypatch.setattr(tune, "choice", choice)
    q, k = torch.zeros(1, 2, 5, 20), torch.zeros(1, 1, 7, 20)
    _, lse = ft.attention(q, k, k, version=version, causal=True, return_lse=True)
    assert (lse == 1).all()
    assert asked == [("v90_tiled", 0, (1, 2, 5, 32), (1, 1, 7, 32), True)], "of the head size that is compiled"


def test_the_emulator_leaves_the_choice_to_the_kernel(version, folder, monkeypatch):
    monkeypatch.setattr(results, "path_of", lambda *a: pytest.fail("a GPU's results are none of the emulator's"))
    q = torch.zeros(1, 2, 5, 32)
    assert (ft.attention(q, q, q, version=version, return_lse=True)[1] == 0).all()


# ---------------------------------------------------------------------------------------------- looking up


def row(version, tiles, seq=512, median=100.0, batch=4, spread=0.0, **more):
    shape = {"batch": batch, "heads": 2, "seq": seq, "head_dim": 64, "dtype": "bfloat16", "causal": False}
    shape |= {name: more.pop(name) for name in list(more) if name in shape}
    times = {"median": median, "p20": median * (1 - spread), "p80": median * (1 + spread)}
    facts = {"version": version.name, "tiles": tiles, "own": "64x64", "kernel_hash": build.source_hash(version)}
    return {**asdict(Shape(**shape)), **facts, "microseconds": times, "warmup": 5, "repetitions": 30, **more}


def problem(version, best, **more):
    """Rows of all tile shapes, `best` the fastest."""
    return [row(version, word, median=50.0 if word == best else 100.0, **more) for word in WORDS]


@pytest.fixture
def chosen(version, folder, monkeypatch):
    """The word that is looked up for a call on the pretended GPU; None: the kernel's own choice."""
    monkeypatch.setattr(tune, "_name", lambda device: GPU["name"])

    def choice(seq=512, batch=4, heads=2, queries=None, head_dim=64, dtype="bfloat16", causal=False, of=version):
        q = torch.empty(batch, heads, seq if queries is None else queries, head_dim, dtype=getattr(torch, dtype))
        k = q.new_empty(batch, heads, seq, head_dim)
        number = tune.choice(of, "the operator", q.to("meta"), k.to("meta"), causal)
        return None if number == tune.OWN_CHOICE else of.tiles[number]

    return choice


def keep(*rows):
    return results.append("tuning", list(rows), where=GPU)


def test_nothing_is_known_of_a_gpu_that_was_not_tuned(chosen, folder, recwarn):
    assert chosen() is None and not folder.exists() and not recwarn.list


def test_the_fastest_of_the_nearest_length_is_taken(version, chosen):
    keep(*problem(version, "32x32", batch=4, seq=512), *problem(version, "64x32", batch=1, seq=2048))
    keep(*problem(version, "64x64", batch=2, seq=1024))
    lengths = {512: "32x32", 700: "32x32", 750: "64x64", 1024: "64x64", 1400: "64x64", 1500: "64x32", 9999: "64x32"}
    assert {seq: chosen(seq) for seq in lengths} == lengths
    assert chosen(1, queries=512) == "32x32"


def test_the_length_is_that_of_the_keys(version, chosen):
    keep(*problem(version, "32x32", seq=512), *problem(version, "64x32", seq=2048))
    assert chosen(512, queries=4096) == "32x32" and chosen(2048, queries=4096) == "64x32"


@pytest.mark.parametrize("other", [{"head_dim": 128}, {"causal": True}])
def test_another_head_size_or_mask_is_another_problem(version, chosen, other):
    keep(*problem(version, "32x32"))
    assert chosen(**other) is None
    keep(*problem(version, "64x32", **other))
    assert (chosen(), chosen(**other)) == ("32x32", "64x32")


def test_another_dtype_is_as_good_as_none(version, chosen):
    keep(*problem(version, "32x32", seq=512), *problem(version, "64x64", seq=2048, batch=1, dtype="float16"))
    assert chosen(2048) == "32x32" and chosen(512, dtype="float16") == "64x64"
    assert chosen(2048, dtype="float32") == "64x64"


def test_a_problem_with_far_fewer_queries_is_not_alike(version, chosen):
    keep(*problem(version, "32x32", batch=4, seq=512))
    assert chosen(batch=2) == "32x32" and chosen(batch=1) is None
    assert chosen(batch=40, heads=8) == "32x32"
    assert chosen(queries=1) is None, "one query beside a long cache"
    keep(*problem(version, "64x32", batch=1, seq=512))
    assert (chosen(batch=1), chosen(batch=4)) == ("64x32", "32x32")


def test_empty_tensors_need_no_choice(version, chosen):
    keep(*problem(version, "32x32"))
    assert chosen(0, queries=512) is None and chosen(queries=0) is None


def test_a_choice_among_some_only_is_none(version, chosen):
    all_of_them = problem(version, "32x32")
    keep(*all_of_them[1:])
    assert chosen() is None
    keep(all_of_them[0])
    assert chosen() is None, "times of two runs are not compared"
    keep(*all_of_them)
    assert chosen() == "32x32"
    keep(row(version, "64x64", median=1.0))
    assert chosen() == "32x32", "still"


def test_what_does_not_launch_or_is_wrong_is_not_taken(version, chosen):
    bad = problem(version, "32x32", wrong="out[0] is 1 instead of 2")[2]
    del bad["microseconds"]
    keep(*problem(version, "64x32")[:2], bad)
    assert chosen() == "64x32"


def test_what_was_measured_of_another_kernel_counts_no_more(version, chosen, recwarn):
    keep(*problem(version, "32x32"))
    assert chosen() == "32x32"
    version.own.write_text(KERNEL + "\n")
    tune._nearest.cache_clear()  # as another operator does
    tune._fastest.cache_clear()
    assert chosen() is None and not recwarn.list


def test_an_edited_kernel_is_another_operator(version, chosen, monkeypatch):
    q = torch.empty(4, 2, 512, 64, dtype=torch.bfloat16, device="meta")
    keep(*problem(version, "32x32"))
    assert tune.choice(version, "an operator", q, q, False) == 2
    version.own.write_text(KERNEL + "\n")
    assert tune.choice(version, "another operator", q, q, False) == -1


def test_a_run_is_noticed_at_the_next_call(version, chosen):
    keep(*problem(version, "32x32"))
    assert chosen() == "32x32"
    keep(*problem(version, "64x32"))
    assert chosen() == "64x32"


def test_versions_and_variants_have_choices_of_their_own(version, chosen):
    keep(*problem(version, "32x32"))
    assert chosen(of=replace(version, name="v91_tiled")) is None
    q = torch.empty(4, 2, 512, 64, device="meta")
    assert tune.choice(registry.resolve("v90:tiles=64x64"), "operator", q, q, False) == -1
    assert tune.choice(ft.version("v08"), "operator", q, q, False) == -1


def test_a_launch_reads_no_file_twice(version, chosen, monkeypatch):
    keep(*problem(version, "32x32"))
    assert chosen() == "32x32"
    monkeypatch.setattr(results, "runs", lambda *a: pytest.fail("the file has not changed"))
    assert chosen() == "32x32" and chosen(600) == "32x32"


DAMAGE = {
    "not JSON": lambda path: path.write_text("{"),
    "another format": lambda path: path.write_text('{"format": 2}'),
    "a row without its problem": lambda path: spoil(path, lambda row: row.pop("seq")),
    "a row without its tile shape": lambda path: spoil(path, lambda row: row.pop("tiles")),
    "a row with a strange time": lambda path: spoil(path, lambda row: row.update(microseconds={"median": 1})),
    "a time that is no number": lambda path: spoil(
        path, lambda row: row.update(microseconds=dict.fromkeys(("median", "p20", "p80"), "x"))
    ),
    "a time of 0": lambda path: spoil(path, lambda row: row["microseconds"].update(median=0)),
    "rows that are none": lambda path: path.write_text('{"format": 1, "gpu": "NVIDIA Test 1", "runs": [{"rows": 3}]}'),
}


def spoil(path, change):
    document = json.loads(path.read_text())
    change(document["runs"][0]["rows"][1])
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_warned_of_once_and_the_kernel_chooses(version, chosen, damage):
    DAMAGE[damage](path := keep(*problem(version, "32x32")))
    with pytest.warns(RuntimeWarning, match=f"{re.escape(str(path))}.*until then kernels choose") as warned:
        assert [chosen(seq) for seq in (512, 512, 600, 700)] == [None] * 4
    assert len(warned) == 1


# ---------------------------------------------------------------------------------------------- measuring


class Shapes(Pretended):
    """A GPU on which a tile shape takes what `seconds` says, or does what `trouble` says instead."""

    def __init__(self, version):
        super().__init__()
        self.version, self.trouble = version, {}
        self.asked: list[str] = []  # of the raw operator
        self.own = 1  # the number of the kernel's own choice

    def operator(self, q, k, v, causal, scale, tiles=-1):
        number = self.own if tiles == -1 else tiles
        word = self.version.tiles[number]
        self.asked.append("auto" if tiles == -1 else word)
        if tiles != -1 and word in self.trouble:
            raise self.trouble[word]
        out, lse = reference.attention_float64(q, k, v, causal, scale)
        return out.to(q.dtype), lse.float(), number

    def captured(self, function, pool=None):
        function()
        word = self.asked[-1]

        def replay():
            self.calls.append(word)
            self.now += self.seconds.get(word, self.seconds[""])

        replay.contender = word
        return replay


@pytest.fixture
def gpu(version, folder, monkeypatch):
    pretended = Shapes(version)
    testing = types.ModuleType("triton.testing")
    testing.do_bench = pretended.do_bench
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.testing", testing)
    monkeypatch.setattr(clock, "_captured", pretended.captured)
    monkeypatch.setattr(clock, "_synchronize", lambda: None)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: pretended.now)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU["name"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 8 * 2**30))
    monkeypatch.setattr(results, "environment", lambda: dict(GPU))
    monkeypatch.setattr(results, "gpu_state", lambda: "1980 MHz, 500 W, 50, P0")
    monkeypatch.setattr(registry, "operator", lambda version, backend: pretended.operator)

    randn, empty, generator = torch.randn, torch.empty, torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    monkeypatch.setattr(torch, "randn", lambda *size, device=None, **more: randn(*size, **more))
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **more: empty(*size, **more))
    return pretended


TINY = {"batch": 1, "heads": 2, "head_dims": (32,), "seqs": (8, 16), "causals": (False,)}


def measured(version, force=False, tiles=None, **chosen):
    plan = tune.plan_of(version, tiles=tiles, **{**TINY, **chosen})
    return tune.measure(plan, force=force, progress=False)


def test_every_tile_shape_is_checked_and_timed_in_turns(version, gpu):
    gpu.seconds |= {"64x64": 3e-4, "64x32": 1e-4, "32x32": 2e-4}
    run = measured(version, seqs=(8,))
    assert run.right and not run.interrupted
    assert gpu.asked == [word for word in WORDS for _ in ("checked", "captured")] + ["auto"]
    order = [name for name, after in zip(gpu.samples, [*gpu.samples[1:], None]) if name != after]
    assert order == [word for turn in range(clock.ROUNDS) for word in clock.order(WORDS, turn)]
    rows = {row["tiles"]: row for row in run.rows}
    assert {word: row["microseconds"]["median"] for word, row in rows.items()} == pytest.approx(
        {"64x64": 300, "64x32": 100, "32x32": 200}, rel=0.03
    )
    for row in rows.values():
        assert (row["version"], row["own"], row["stale"]) == ("v90_tiled", "64x32", False)
        assert Shape.of(row) == Shape(1, 2, 8, 32, "float32")
        assert row["kernel_hash"] == build.source_hash(version) and row["error"] < 1e-6
        assert (row["warmup"], row["repetitions"]) == (5, 30)


def test_what_was_measured_is_looked_up(version, gpu, chosen):
    gpu.seconds |= {"32x32": 1e-5}
    measured(version)
    assert chosen(8, batch=1, head_dim=32, dtype="float32") == "32x32"


def test_what_is_known_is_not_measured_again(version, gpu):
    measured(version, seqs=(8,))
    before = list(gpu.asked)
    again = measured(version, seqs=(8, 16))
    assert gpu.asked[len(before) :].count("auto") == 1, "one problem"
    assert {(row["seq"], row["tiles"]) for row in again.rows} == {(n, word) for n in (8, 16) for word in WORDS}
    assert again.said[0] == "1 of 2 problems were measured before: --force measures them anew"
    count = len(gpu.asked)
    third = measured(version, seqs=(8, 16))
    assert len(gpu.asked) == count and len(third.rows) == 6
    assert measured(version, seqs=(8, 16), force=True).rows and len(gpu.asked) > count


def test_after_a_change_of_the_kernel_all_is_measured_again(version, gpu):
    measured(version)
    count = len(gpu.asked)
    version.own.write_text(KERNEL + "\n")
    run = measured(version)
    assert len(gpu.asked) == 2 * count and not any(row["stale"] for row in run.rows)


def test_shapes_that_were_not_compared_are_measured_together(version, gpu):
    measured(version, tiles=WORDS[:2])
    assert "32x32" not in gpu.asked
    count = len(gpu.asked)
    assert not measured(version, tiles=WORDS[1:2]).said[1:], "nothing new"
    assert len(gpu.asked) == count
    measured(version)
    assert set(gpu.asked[count:]) == {*WORDS, "auto"}


def test_an_interruption_keeps_the_problems_that_were_done(version, gpu):
    def interrupt(name):
        if "auto" in gpu.asked:  # the last thing of the first of two problems
            raise KeyboardInterrupt

    gpu.before_sample = interrupt
    run = measured(version)
    assert run.interrupted and {row["seq"] for row in run.rows} == {8} and len(run.rows) == 3
    assert "goes on from here" in run.said[0]
    assert {row["seq"] for row in tune.stored(version)} == {8}

    gpu.before_sample, count = lambda name: None, len(gpu.asked)
    run = measured(version)
    assert not run.interrupted and {row["seq"] for row in run.rows} == {8, 16}
    assert gpu.asked[count:].count("auto") == 1, "only the problem that was not done"


def test_each_problem_is_kept_before_the_next_begins(version, gpu):
    """Whatever ends a process: what it has done is not lost."""
    counts = []
    gpu.before_sample = lambda name: counts.append(len(tune.stored(version)))
    measured(version)
    assert sorted(set(counts)) == [0, 3]


REFUSAL = "a block of 256 threads with 300000 bytes of shared memory: invalid argument"


def test_a_shape_that_cannot_launch_says_so_and_is_not_tried_again(version, gpu, chosen):
    gpu.trouble = {"64x64": RuntimeError(f"CUDA: {REFUSAL}")}
    run = measured(version)
    assert run.right
    refused = [row for row in run.rows if row["tiles"] == "64x64"]
    assert [row["refused"] for row in refused] == [REFUSAL] * 2
    assert not {"failed", "microseconds"} & set(refused[0])
    text = tune.render(tune.tables_of(run.rows, WORDS))
    assert "no launch" in text and f"64x64 does not launch at N=8, 16: {REFUSAL}" in text
    count = len(gpu.asked)
    measured(version)
    assert len(gpu.asked) == count
    assert chosen(8, batch=1, head_dim=32, dtype="float32") in WORDS[1:]


@pytest.mark.parametrize("words", ["invalid configuration argument", "too many resources requested for launch"])
def test_other_ways_to_refuse_a_block(version, gpu, words):
    gpu.trouble = {"64x64": RuntimeError(f"CUDA: a block of 256 threads with 9 bytes of shared memory: {words}\n at 3")}
    run = measured(version, seqs=(8,))
    (row,) = (row for row in run.rows if row["tiles"] == "64x64")
    assert run.right and row["refused"] == f"a block of 256 threads with 9 bytes of shared memory: {words}"


def test_what_an_earlier_kernel_did_is_no_refusal(version, gpu):
    """A launch is told of a stray access before it, and every launch after it."""
    words = "a block of 256 threads with 9 bytes of shared memory: an illegal memory access was encountered"
    gpu.trouble = {"64x32": RuntimeError(f"CUDA: {words}")}
    run = measured(version, seqs=(8,))
    assert not run.right and {row["tiles"] for row in tune.stored(version)} == {"64x64", "32x32"}
    assert f"64x32 failed at N=8: RuntimeError: CUDA: {words}" in tune.render(tune.tables_of(run.rows, WORDS))


def test_a_gpu_that_a_kernel_has_brought_down_ends_no_command(version, gpu, monkeypatch):
    def empty(*arguments, **options):
        if options.get("device") == "cuda":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return made(*arguments, **options)

    made = torch.empty
    monkeypatch.setattr(torch, "empty", empty)
    run = measured(version)
    assert {row["own"] for row in run.rows} == {None} and len(run.rows) == 6


def test_a_failure_is_shown_but_not_kept(version, gpu):
    gpu.trouble = {"64x64": torch.OutOfMemoryError("CUDA out of memory")}
    run = measured(version)
    assert not run.right
    assert "64x64 failed at N=8, 16: out of memory" in tune.render(tune.tables_of(run.rows, WORDS))
    assert {row["tiles"] for row in tune.stored(version)} == set(WORDS[1:])
    gpu.trouble = {}
    assert measured(version).right and {row["tiles"] for row in tune.stored(version)} == set(WORDS)


def test_a_wrong_shape_gets_no_time(version, gpu, monkeypatch):
    right = gpu.operator

    def operator(q, k, v, causal, scale, tiles=-1):
        out, lse, number = right(q, k, v, causal, scale, tiles)
        return (out + 1 if tiles == 2 else out), lse, number

    monkeypatch.setattr(registry, "operator", lambda version, backend: operator)
    run = measured(version)
    assert not run.right and "32x32" not in gpu.calls
    assert re.search(
        r"^32x32 is wrong at N=8: out\[.*instead of", tune.render(tune.tables_of(run.rows, WORDS)), re.MULTILINE
    )


def test_an_own_choice_that_cannot_launch_is_unknown(version, gpu):
    def operator(*arguments):
        if len(arguments) == 6 and arguments[5] == -1:
            raise RuntimeError(f"CUDA: {REFUSAL}")
        return right(*arguments)

    right, gpu.operator = gpu.operator, operator
    assert {row["own"] for row in measured(version).rows} == {None}


def test_a_readers_own_file_is_measured_but_not_kept(version, gpu, tmp_path, folder):
    path = tmp_path / "mine.cu"
    path.write_text(KERNEL)
    run = measured(replace(version, name="mine", own=path))
    assert len(run.rows) == 6 and not folder.exists()
    assert run.said == ["not kept: mine.cu is a file of your own, whose name means nothing later"]


def test_a_damaged_file_is_refused_before_anything_is_measured(version, gpu, folder):
    DAMAGE["a row without its problem"](path := keep(*problem(version, "32x32")))
    before = path.read_text()
    with pytest.raises(ValueError, match="is damaged"):
        measured(version)
    assert gpu.asked == [] and path.read_text() == before


def test_a_gpu_that_is_too_old_is_refused(version, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(ValueError, match=r"needs a GPU of compute capability 8.0 or later; NVIDIA Test 1 has 7.5"):
        measured(version)


# ---------------------------------------------------------------------------------------------- plans


def test_a_plan_is_the_papers_grid(version):
    half = replace(version, dtypes=("float16", "bfloat16"))
    plan = tune.plan_of(half)
    assert plan.tiles == WORDS and len(plan.shapes) == 2 * 2 * 6
    assert {(shape.batch * shape.seq, shape.heads * shape.head_dim) for shape in plan.shapes} == {(16384, 2048)}
    assert {shape.dtype for shape in plan.shapes} == {"bfloat16"}
    assert {shape.dtype for shape in tune.plan_of(half, dtype="float16").shapes} == {"float16"}
    assert {shape.dtype for shape in tune.plan_of(version).shapes} == {"float32"}, "what the version takes"
    assert tune.plan_of(version, tiles=("32x32", "64x64", "32x32")).tiles == ("32x32", "64x64"), (
        "in the order asked for"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiles": ("64x64", "1x1")}, "v90_tiled has no tile shape '1x1': it has 64x64, 64x32, 32x32"),
        ({"tiles": ("auto",)}, "has no tile shape 'auto'"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16: v90_tiled takes float32"),
        ({"head_dims": (16,)}, "head_dim is 16: v90_tiled is compiled for 32, 64, 128"),
        ({"head_dims": (256,)}, "head_dim is 256: v90_tiled takes 1 to 128"),
        ({"seqs": (1000,)}, "length 1000 does not divide 16,384"),
    ],
)
def test_a_plan_that_is_none_is_refused(version, options, message):
    with pytest.raises(ValueError, match=message):
        tune.plan_of(version, **options)


def test_a_version_with_one_shape_cannot_be_tuned(version):
    for name in ("v08", "v90:tiles=64x64"):
        with pytest.raises(ValueError, match="has one tile shape, and nothing to choose from; with several: "):
            tune.plan_of(name)


# ---------------------------------------------------------------------------------------------- tables


def shown(rows, tiles=WORDS, **facts):
    facts = {"gpu": GPU["name"], "date": "2026-01-02T03:04:05+00:00", "stale": False} | facts
    return tune.tables_of([{**row, **facts} for row in rows], tiles)


def test_a_line_has_the_best_what_is_as_good_and_the_loss_of_the_own_choice(version):
    times = {"64x64": 102.0, "64x32": 100.0, "32x32": 150.0}
    (table,) = shown(row(version, word, median=time, spread=0.03) for word, time in times.items())
    (line,) = table.lines
    assert (line.best, line.own) == ("64x32", "64x64")
    assert line.loss("64x64") == pytest.approx(0.02) and line.loss("64x32") == 0
    assert line.noise("64x64") and not line.noise("64x32") and not line.noise("32x32")
    assert line.tflops("64x32") == pytest.approx(4 * 8 * 512**2 * 64 / 100e-6 / 1e12)
    assert line.loss("128x64") is None and line.microseconds(None) is None


def rows_of(version, columns, spread=0.0, **more):
    """Rows of lengths 512, 1024, …, the times of each tile shape in a list."""
    return [
        row(version, word, seq=512 << i, batch=32 >> i, median=median, spread=spread, **more)
        for word, column in columns.items()
        for i, median in enumerate(column)
    ]


def test_the_comparison_of_three_shapes_is_a_table(version):
    columns = {"64x64": (100.0, 200.0), "64x32": (80.0, 240.0), "32x32": (160.0, 400.0)}
    text = tune.render(shown(rows_of(version, columns, spread=0.01)))
    lines = text.splitlines()
    assert lines[0] == "bfloat16, B·N=16,384, H=2, D=64, full on NVIDIA Test 1, measured 2026-01-02"
    assert lines[4].split() == ["N", "64x64", "64x32", "32x32", "own", "loses"]
    flops = [4 * 64 * 512**2 * 64, 4 * 32 * 1024**2 * 64]
    speeds = {word: [f / t / 1e6 for f, t in zip(flops, column)] for word, column in columns.items()}
    cells = [line.replace("* ", "*").replace("~ ", "~").split() for line in lines[6:]]
    first, second = ([f"{speeds[word][i]:.1f}" for word in WORDS] for i in range(2))
    assert cells[0] == ["512", first[0], "*" + first[1], first[2], "64x64", "25.0", "%"]
    assert cells[1] == ["1024", "*" + second[0], *second[1:], "64x64", "0.0", "%"]
    means = {word: 2 / (1 / a + 1 / b) for word, (a, b) in speeds.items()}
    assert cells[3][:2] == ["h.", "mean"] and cells[3][2] == f"*{means['64x64']:.1f}"
    assert cells[3][3:6] == [f"{means[word]:.1f}" for word in ("64x32", "32x32", "64x64")]
    ideal = 2 / (1 / speeds["64x32"][0] + 1 / speeds["64x64"][1])
    assert cells[3][6] == f"{100 * (ideal / means['64x64'] - 1):.1f}"


def test_only_some_columns(version):
    columns = {"64x64": (100.0,), "64x32": (80.0,), "32x32": (160.0,)}
    (table,) = shown(rows_of(version, columns), tiles=("32x32", "64x32"))
    assert table.tiles == ("32x32", "64x32") and table.lines[0].best == "64x32"
    header, _, cells = tune.render([table]).splitlines()[4:7]
    assert header.split() == ["N", "32x32", "64x32", "own", "loses"]
    assert cells.split()[-2:] == ["64x64", "-"], "what the own choice loses is not among them"


def test_a_comparison_of_some_shapes_is_a_table_apart_and_has_no_column_of_the_others(version):
    every = dict.fromkeys(WORDS, (100.0, 200.0))
    some = dict.fromkeys(("64x64", "32x32"), (100.0,))
    made = shown([*rows_of(version, every), *rows_of(version, some, dtype="float16", causal=True)])
    assert [(table.problem, table.tiles) for table in made] == [
        ("bfloat16, B·N=16,384, H=2, D=64, full", WORDS),
        ("float16, B=32, H=2, D=64, causal", ("64x64", "32x32")),
    ]


def test_a_shape_wins_where_none_is_faster_by_more_than_the_spread(version):
    columns = {"64x64": (100.0, 150.0, 100.0), "64x32": (101.0, 100.0, 110.0), "32x32": (150.0, 150.0, 150.0)}
    (table,) = shown(rows_of(version, columns, spread=0.02))
    assert {word: table.wins(word) for word in WORDS} == {"64x64": [512, 2048], "64x32": [512, 1024], "32x32": []}


def test_noise_is_marked_in_text_and_markdown(version):
    rows = rows_of(version, {"64x64": (101.0,), "64x32": (100.0,), "32x32": (160.0,)}, spread=0.02)
    text, markdown = (tune.render(shown(rows), format) for format in ("simple", "github"))
    best, near = (f"{4 * 64 * 512**2 * 64 / time / 1e6:.1f}" for time in (100.0, 101.0))
    assert f"~ {near}" in text and f"* {best}" in text and text.rstrip().endswith("noise")
    assert f"~ {near} |" in markdown and f"**{best}** |" in markdown and "bold: the best" in markdown


def test_a_missing_shape_and_a_stale_row_are_told(version):
    rows = rows_of(version, {"64x64": (100.0, 200.0), "64x32": (80.0, 150.0), "32x32": (160.0,)})
    text = tune.render(shown(rows, stale=True))
    assert "stale, measured before the kernel's last change" in text and re.search(r"^ *512\* ", text, re.MULTILINE)
    assert re.search(r"^ *1024\* .* - +64x64 ", text, re.MULTILINE)
    assert "stale" not in tune.render(shown(rows))


def test_every_gpu_and_family_has_a_table(version):
    rows = [
        *problem(version, "64x32", batch=32),
        *problem(version, "64x32", batch=16, seq=1024),
        *problem(version, "64x32", batch=1),
        *problem(version, "64x32", batch=32, causal=True),
    ]
    made = shown(rows)
    assert [(table.problem, len(table.lines)) for table in made] == [
        ("bfloat16, B=1, H=2, D=64, full", 1),
        ("bfloat16, B·N=16,384, H=2, D=64, full", 2),
        ("bfloat16, B=32, H=2, D=64, causal", 1),
    ]


def test_json_has_the_figures(version):
    rows = rows_of(version, {"64x64": (101.0,), "64x32": (100.0,), "32x32": (160.0,)}, spread=0.02)
    (table,) = json.loads(tune.render(shown(rows), "json"))
    (line,) = table["lines"]
    assert (table["gpu"], line["seq"], line["best"], line["own"]) == (GPU["name"], 512, "64x32", "64x64")
    assert line["own_loses"] == pytest.approx(0.01) and line["tiles"]["64x64"]["noise"] is True
    assert line["tiles"]["32x32"]["microseconds"]["median"] == 160.0


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="format is 'pdf': accepted are simple, github, json"):
        tune.render([], "pdf")


# ---------------------------------------------------------------------------------------------- the command


call = partial(command.call, "tune")


SMALL = ["--batch-size", "1", "--num-heads", "2", "--head-dims", "32", "--seq-lens", "8,16", "--full"]


def test_the_command_measures_keeps_and_shows(gpu, folder):
    result = call("v90", *SMALL, "--warmup", "2", "--repetitions", "6")
    assert result.exit_code == 0, result.output
    assert f"kept in {folder / 'tuning' / 'test_1.json'}" in result.stderr
    assert "float32, B=1, H=2, D=32, full on NVIDIA Test 1" in result.stdout
    assert {(row["warmup"], row["repetitions"]) for row in tune.stored(registry.resolve("v90"))} == {(2, 6)}
    again = call("v90", *SMALL)
    assert again.stdout == result.stdout and "2 of 2 problems were measured before" in again.stderr
    stored = call("v90", "--stored", "--gpu", "test_1")
    assert (stored.exit_code, stored.stdout, stored.stderr) == (0, result.stdout, "")
    some = call("v90", "--stored", "--tiles", "64x32,32x32", *SMALL, "--seq-lens", "16", "--format", "github")
    assert "| 16 |" in re.sub(" +", " ", some.stdout) and "64x64 " not in some.stdout.partition("own:")[0]


def test_ctrl_c_shows_what_was_done(gpu):
    def interrupt(name):
        if "auto" in gpu.asked:
            raise KeyboardInterrupt

    gpu.before_sample = interrupt
    result = call("v90", *SMALL)
    assert result.exit_code == 130 and "goes on from here" in result.stderr
    assert re.search(r"^ +8 ", result.stdout, re.MULTILINE) and not re.search(r"^ +16 ", result.stdout, re.MULTILINE)


def test_an_interruption_at_once_shows_nothing(gpu):
    def interrupt(name):
        raise KeyboardInterrupt

    gpu.before_sample = interrupt
    result = call("v90", *SMALL)
    assert (result.exit_code, result.stdout) == (130, "") and "nothing measured" in result.stderr


def test_a_wrong_shape_gives_exit_status_1(gpu):
    gpu.trouble = {"64x64": RuntimeError("no")}
    result = call("v90", *SMALL)
    assert result.exit_code == 1 and "64x64 failed at N=8, 16: RuntimeError: no" in result.stdout


def test_a_kernel_that_does_not_compile_shows_why(gpu, monkeypatch):
    def operator(version, backend):
        raise build.BuildError("v90_tiled.cu:3: expected ';'")

    monkeypatch.setattr(registry, "operator", operator)
    result = call("v90", *SMALL)
    assert (result.exit_code, result.stdout) == (1, "") and "v90_tiled.cu:3: expected ';'" in result.stderr


def test_nothing_stored_is_said(version, folder):
    result = call("v90", "--stored")
    assert (result.exit_code, result.stdout) == (1, "") and "nothing of this is stored" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do_instead(version):
    result = call("v90")
    assert result.exit_code == 2 and "needs a CUDA GPU" in result.stderr and "tune --stored" in result.stderr


def test_without_triton_it_says_so(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.testing", None)
    result = call("v90", *SMALL)
    assert result.exit_code == 2 and "timing needs Triton's do_bench" in result.stderr


@pytest.mark.parametrize("more", [[], ["--stored"]], ids=["measured", "stored"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused(version, gpu, damage, more):
    DAMAGE[damage](keep(*problem(version, "32x32")))
    result = call("v90", *SMALL, *more)
    assert result.exit_code == 2 and re.search("is damaged|has results format 2", result.stderr) and not gpu.asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["v0x"], "unknown version 'v0x'"),
        (["v08"], "v08_fused_softmax has one tile shape"),
        (["v90", "--tiles", "64x64,1x1"], "v90_tiled has no tile shape '1x1': it has 64x64, 64x32, 32x32"),
        (["v90", "--seq-lens", "512,x"], "'512,x' is no list of lengths"),
        (["v90", "--head-dims", "x"], "'x' is no list of head sizes"),
        (["v90", "--head-dims", "40", "--num-heads", "2"], "head_dim is 40: v90_tiled is compiled for 32, 64, 128"),
        (["v90", "--dtype", "float16"], "dtype is float16: v90_tiled takes float32"),
        (["v90", "--gpu", "h200"], "--gpu chooses among stored times: it needs --stored"),
        (["v90", "--stored", "--gpu", "b200"], "no tuning of a GPU 'b200' in results: those with tuning are none"),
        (["v90", "--stored", "--force"], "--stored measures nothing"),
        (["v90", "--repetitions", "0"], "0 is not in the range x>=1"),
        ([], "Missing argument"),
    ],
)
def test_the_command_refuses(version, folder, arguments, message):
    assert message in command.refused("tune", *arguments)


# ---------------------------------------------------------------------------------------------- of the ladder


TUNED = [version for version in ft.versions() if version.tiles]
every_tuned = pytest.mark.parametrize("version", TUNED, ids=[version.name for version in TUNED])


@every_tuned
def test_the_words_are_in_the_kernels_order(version):
    assert version.strided
    (option,) = (option for option in version.options if option.name == "tiles")
    assert [text for _, text in option.values] == [str(number) for number in range(-1, len(version.tiles))]
    for number, word in enumerate(version.tiles):
        chosen = registry.resolve(f"{version.name}:tiles={word}")
        q = torch.zeros(1, 1, 16, 64, dtype=getattr(torch, version.dtypes[0]))
        # Instrumented, as test_variants.py has it built too.
        assert registry.operator(version, "instrumented")(q, q, q, False, 1.0, number)[2] == number
        assert registry.operator(chosen, "instrumented")(q, q, q, False, 1.0)[2] == number


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_tuned
def test_tuned_on_a_gpu(version, tmp_path):
    plan = tune.plan_of(version, batch=2, heads=4, seqs=(512,), head_dims=(64,), causals=(True,))
    run = tune.measure(plan, repetitions=3, progress=False, folder=tmp_path)
    assert run.right and {row["tiles"] for row in run.rows} == set(version.tiles)
    assert {row["own"] for row in run.rows} <= set(version.tiles)
    q = torch.randn(2, 4, 512, 64, device="cuda", dtype=getattr(torch, plan.shapes[0].dtype))
    operator = registry.operator(version, "cuda")
    best = tune.choice(version, operator, q, q, True, tmp_path)
    (line,) = tune.current(version, torch.cuda.get_device_name(), tmp_path).values()
    assert version.tiles[best] == line.best
    assert operator(q, q, q, True, 0.125, best)[2] == best
    assert ops.attention(q, q, q, version=version, causal=True).isfinite().all()
