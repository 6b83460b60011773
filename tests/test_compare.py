"""Comparisons: problems, contenders, verdicts, times, and every way of writing them down."""

import csv
import functools
import io
import json
import math
import re
import time
from html.parser import HTMLParser

import pytest
import torch
from safetensors.torch import save_file

import flash_tutorial as ft
from flash_tutorial import compare as comparing
from flash_tutorial import emulator
from flash_tutorial.clock import Timing
from flash_tutorial.compare import Comparison, Problem, Row, compare, render
from flash_tutorial.diff import diff

SMALL = Problem(batch=1, heads=2, kv_heads=1, queries=5, keys=7, head_dim=32)
WIDTH = 100  # columns that a reader's terminal has


def variant(tmp_path, name: str, old: str, new: str):
    """A copy of v02 with `old` replaced, under the file name `name`."""
    text = ft.version("v02").source.read_text()
    assert old in text
    path = tmp_path / name
    path.write_text(text.replace(old, new))
    return path


@pytest.fixture
def wrong(tmp_path):
    return variant(tmp_path, "wrong_v02.cu", "dot * params.scale", "dot * params.scale * 2")


@pytest.fixture
def broken(tmp_path):
    return variant(tmp_path, "broken_v02.cu", "dot * params.scale", "dot * params.no_such_field")


@pytest.fixture
def racy(tmp_path):
    return variant(tmp_path, "racy_v02.cu", "__syncthreads();  // S is whole", ";  // S is whole")


# ---------------------------------------------------------------------------------------------- problems


def test_a_seed_gives_the_same_normal_numbers_every_time():
    first, again, other = Problem(queries=900), Problem(queries=900), Problem(queries=900, seed=1)
    for a, b, c in zip(first.tensors(), again.tensors(), other.tensors(), strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c)
    q, k, v = first.tensors()
    assert q.shape == (1, 2, 900, 64) and k.shape == v.shape == (1, 2, 127, 64)
    assert abs(q.mean()) < 0.02 and abs(q.std() - 1) < 0.02


def test_lower_precision_rounds_the_same_numbers():
    exact, rounded = Problem().tensors(), Problem(dtype="bfloat16").tensors()
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(exact, rounded, strict=True))


def test_without_addr2line_addresses_stand_for_lines(monkeypatch):
    compare("v00", SMALL)  # builds what there is to build
    monkeypatch.setattr(emulator, "_symbols", functools.cache(emulator._Symbols))
    monkeypatch.setenv("PATH", "")
    comparison = compare("v00", SMALL)
    assert all("v00_naive" in launch.kernel for launch in comparison[0].report.launches)
    assert re.search(
        r"^ +0  v00_naive-\w+-instrumented\.so\+0x\w+", comparing.describe(comparison, lines=True), re.MULTILINE
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 6, "kv_heads": 4}, "heads is 6 and kv_heads is 4: heads has to be a multiple"),
        ({"queries": -1}, "queries is -1: it has to be a whole number, 0 or more"),
        ({"heads": 0}, "heads is 0: it has to be a whole number, 1 or more"),
        ({"head_dim": 1.5}, "head_dim is 1.5"),
        ({"dtype": "float8"}, "dtype is 'float8': accepted are float32, float16, bfloat16"),
        ({"scale": math.inf}, "scale is inf: any number that is finite in float32"),
        ({"device": "tpu"}, "device is 'tpu': accepted are cpu"),
    ],
)
def test_a_problem_that_is_none_is_refused(options, message):
    with pytest.raises(ValueError) as refusal:
        Problem(**options)
    assert message in str(refusal.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match=r"device is 'cuda', but torch .* sees no CUDA GPU: use cpu"):
        Problem(device="cuda")


def test_too_much_memory_is_refused():
    with pytest.raises(ValueError, match="cannot be made"):
        Problem(queries=10**12).tensors()


def test_a_file_gives_shapes_dtype_and_numbers(tmp_path):
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    save_file({"layer.q": q, "layer.k": k, "layer.v": v}, tmp_path / "some.safetensors")
    problem = Problem.from_file(tmp_path / "some.safetensors", "layer", causal=True)
    assert [problem.batch, problem.heads, problem.kv_heads, problem.queries, problem.keys] == [2, 4, 2, 3, 5]
    assert (problem.head_dim, problem.dtype, problem.causal) == (8, "float32", True)
    assert all(map(torch.equal, problem.tensors(), (q, k, v)))
    assert "from some.safetensors, layer" in str(problem)
    half = Problem.from_file(tmp_path / "some.safetensors", "layer", dtype="float16")
    assert torch.equal(half.tensors()[0], q.half())


def tensors(q=(1, 2, 3, 8), k=(1, 2, 5, 8), v=(1, 2, 5, 8), dtype=torch.float32):
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in (("q", q), ("k", k), ("v", v))}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"q": torch.zeros(1, 1, 1, 1)}, "has no tensor k, v: it holds q"),
        ({"a.q": torch.zeros(1), "b.q": torch.zeros(1)}, "has no tensor q, k, v: prefixes that it has: a, b"),
        (tensors(q=(2, 3, 8)), "q (2, 3, 8), k (1, 2, 5, 8), v (1, 2, 5, 8): each has to be (batch, heads"),
        (tensors(v=(1, 2, 4, 8)), "k and v have to be alike"),
        (tensors(q=(1, 2, 3, 9)), "k and v have to be alike, and to share batch and head_dim with q"),
        (tensors(q=(1, 3, 3, 8)), "heads is 3 and kv_heads is 2"),
        (tensors(dtype=torch.int64), "holds int64"),
        (tensors() | {"q": torch.zeros(1, 2, 3, 8).half()}, "holds float16, float32: q, k and v have to be of one"),
    ],
)
def test_a_file_of_other_content_is_refused(tmp_path, content, message):
    save_file(content, tmp_path / "some.safetensors")
    with pytest.raises(ValueError) as refusal:
        Problem.from_file(tmp_path / "some.safetensors")
    assert message in str(refusal.value)


def test_a_missing_a_damaged_and_a_cut_file_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.safetensors is not there: a safetensors file is needed"):
        Problem.from_file(tmp_path / "nowhere.safetensors")
    with pytest.raises(ValueError, match="is a directory"):
        Problem.from_file(tmp_path)
    whole, damaged = tmp_path / "whole.safetensors", tmp_path / "damaged.safetensors"
    save_file(tensors(), whole)
    for content in (b"", b"q k v", whole.read_bytes()[:-9]):
        damaged.write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged\.safetensors is not a whole safetensors file: "):
            Problem.from_file(damaged)


# ---------------------------------------------------------------------------------------------- comparing


def test_versions_and_references_on_the_same_tensors():
    comparison = compare(["v00", "fa2", "baseline", "sdpa"], SMALL)
    assert [row.name for row in comparison] == ["v00_naive", "v02_fa2", "baseline", "sdpa"]
    assert comparison.right and len(comparison) == 4
    assert comparison["baseline"].error == comparison["baseline"].pytorch_error == comparison["v02"].pytorch_error
    for row in comparison:
        assert 0 < row.error <= row.limit and not row.note
        assert (row.counters is not None) == (row.name in ("v00_naive", "v02_fa2"))
    naive, fused = comparison["v00"].counters, comparison["v02"].counters
    assert naive.shared_load_requests == 0 < fused.shared_load_requests
    assert fused.global_store_bytes == 2 * 5 * 33 * 4 < naive.global_store_bytes  # O and lse, nothing else
    assert comparison.baseline == "baseline"
    with pytest.raises(KeyError, match=r"v03.* was not compared: v00_naive, v02_fa2"):
        comparison["v03"]


def test_all_means_every_version_that_takes_the_dtype():
    contenders = comparing.find_contenders(["sdpa", "all"], SMALL)
    takers = [version.name for version in ft.versions() if "float32" in version.dtypes]
    assert [each.name for each in contenders] == ["sdpa", *takers]


@pytest.mark.parametrize("problem", [SMALL, Problem(heads=4, kv_heads=2, queries=6, keys=3, head_dim=8, causal=True)])
def test_references_solve_the_problem_that_the_versions_solve(problem):
    comparison = compare(["baseline", "sdpa", "sdpa_math", "v03"], problem)
    assert {row.name: row.note for row in comparison if row.status != "right"} == {}


def test_what_goes_wrong_is_in_its_row_and_the_others_go_on(wrong, broken, racy):
    comparison = compare([wrong, broken, racy, "v02"], Problem(queries=40, keys=70, head_dim=32))
    assert [row.status for row in comparison] == ["wrong", "failed", "finding", "right"]
    assert [row.name for row in comparison] == ["wrong_v02.cu", "broken_v02.cu", "racy_v02.cu", "v02_fa2"]
    assert not comparison.right
    row = comparison["wrong_v02.cu"]
    assert row.error > row.limit and row.note
    assert "BuildError" in comparison[1].note and "no_such_field" in comparison[1].note
    assert comparison[1].error is None
    assert "data race" in comparison[2].note and "racy_v02.cu:" in comparison[2].note
    assert comparison[2].report.findings
    shown = render(comparison)
    assert max(len(line) for line in shown.splitlines() if ".cu:" not in line and " | " not in line) <= WIDTH
    assert "dot * params.no_such_field" in shown


def test_a_reference_that_needs_a_gpu_fails_in_its_row():
    comparison = compare(["sdpa_cudnn", "v02"], SMALL)
    assert [row.status for row in comparison] == ["failed", "right"]
    assert "cuDNN attention does not support this input (float32 on cpu)" in comparison[0].note


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["v07_nothing"], {}, "unknown version 'v07_nothing'"),
        (["sdpaa"], {}, "PyTorch's own are baseline, sdpa, sdpa_flash"),
        (["v02", "sdpa", "fa2"], {}, "v02_fa2 comes twice"),
        (["all", "v03"], {}, "v03_warp_local comes twice"),
        (["v02"], {"baseline": "sdpa"}, "the baseline sdpa is not among those compared: v02_fa2"),
        (["v02"], {"baseline": "nothing"}, "unknown version 'nothing'"),
        (["v02"], {"problem": Problem(dtype="float16")}, "dtype is float16: v02_fa2 takes float32; float16: "),
        (["v02"], {"problem": Problem(head_dim=129)}, "head_dim is 129: v02_fa2 takes 1 to 128"),
        (["nowhere/my_v03.cu"], {}, "there is no kernel file 'nowhere/my_v03.cu'"),
        ([], {}, "nothing to compare"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(monkeypatch, names, options, message):
    monkeypatch.setattr(ft, "attention", lambda *args, **kwargs: pytest.fail("it ran"))
    with pytest.raises(ValueError) as refusal:
        compare(names, **options)
    assert message in str(refusal.value)


def test_a_file_whose_name_says_nothing_needs_like(tmp_path):
    path = variant(tmp_path, "mine.cu", "Bottleneck", "Bottleneck")
    with pytest.raises(ValueError, match="does not say which version it is like"):
        compare(path, SMALL)
    assert compare(path, SMALL, like="v02").right


# ---------------------------------------------------------------------------------------------- time


@pytest.fixture
def pretended_gpu(monkeypatch):
    """A comparison as on a GPU: the numbers are made up, all else is what a GPU's would go through."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Pretended GPU")
    problem = Problem(batch=1, heads=1, queries=1000, keys=1000, head_dim=64, device="cuda")
    monkeypatch.setattr(Problem, "tensors", lambda self: (None, None, None))
    rows = [
        Row("v00_naive", "Naive", error=1e-7, pytorch_error=2e-7, limit=1.4e-6),
        Row("sdpa", "PyTorch", error=2e-7, pytorch_error=2e-7, limit=1.4e-6),
        Row("v02_fa2", "FlashAttention-2", "failed", note='RuntimeError: <no> & "why"'),
    ]
    return Comparison(problem, rows, "sdpa")


def test_right_rows_get_times_and_a_speed_relative_to_the_baseline(monkeypatch, pretended_gpu):
    def pretended_times(functions):
        assert {name: function() for name, function in functions.items()} == {"v00_naive": "v00_naive", "sdpa": "sdpa"}
        return {"v00_naive": Timing(500.0, 400.0, 1000.0), "sdpa": Timing(250.0, 249.0, 251.0)}, "a stopwatch"

    monkeypatch.setattr(comparing, "time_on_gpu", pretended_times)
    contenders = [comparing.Contender(row.name, "", lambda name=row.name: name, False) for row in pretended_gpu]
    comparing._add_times(pretended_gpu, contenders, ())
    naive, sdpa, failed = pretended_gpu
    assert (naive.microseconds, naive.percentiles) == (500, (400, 1000))
    assert (naive.speed, sdpa.speed, failed.speed) == (0.5, 1, None)
    assert naive.tflops == pytest.approx(4 * 1000 * 1000 * 64 / 500e-6 / 1e12)
    for shown in (render(pretended_gpu), comparing.describe(pretended_gpu)):
        assert "500.0" in shown and "400.0 to 1000.0" in shown and "a stopwatch" in shown and "Pretended GPU" in shown
        assert max(map(len, shown.splitlines())) <= WIDTH
    assert "sdpa = 1" in render(pretended_gpu) and "0.500" in render(pretended_gpu)
    assert json.loads(render(pretended_gpu, "json"))["rows"][0]["microseconds_p80"] == 1000


def test_a_gpu_that_gives_up_leaves_the_errors_and_says_so(monkeypatch, pretended_gpu):
    def give_up(functions):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(comparing, "time_on_gpu", give_up)
    comparing._add_times(pretended_gpu, [], ())
    assert [row.status for row in pretended_gpu] == ["failed"] * 3 and pretended_gpu[0].error == 1e-7
    assert "not timed: CUDA error: an illegal memory access" in render(pretended_gpu)


def test_without_triton_torchs_own_timer_is_used(monkeypatch):
    find_spec = comparing.importlib.util.find_spec
    monkeypatch.setattr(
        comparing.importlib.util, "find_spec", lambda name, *more: None if name == "triton" else find_spec(name, *more)
    )
    timings, timer = comparing.time_on_gpu({"wait": lambda: time.sleep(2e-3)})
    assert timer == "torch.utils.benchmark, L2 warm"
    assert 2000 <= timings["wait"].p20 <= timings["wait"].median <= timings["wait"].p80


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_times():
    comparison = compare(["v02", "sdpa"], Problem(queries=256, keys=256, device="cuda"))
    assert comparison.right and comparison.timer
    assert all(
        row.microseconds > 0 and row.percentiles[0] <= row.microseconds <= row.percentiles[1] for row in comparison
    )
    assert comparison["sdpa"].speed == 1


# ---------------------------------------------------------------------------------------------- rendering


@pytest.fixture(scope="module")
def small():
    return compare(["v00", "v03", "sdpa"], SMALL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_terminal_of_100_columns_holds_every_version(dtype):
    large = compare("all", Problem(heads=6, queries=30, keys=150, head_dim=8, dtype=dtype))
    text = render(large)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(version.name in text for version in ft.versions() if dtype in version.dtypes)


def test_simple_and_github_show_every_row(small):
    for text in (render(small), render(small, "github")):
        for row in small:
            (line,) = [line for line in text.splitlines() if row.name in line and "right" in line]
            assert f"{row.error:.1e}" in line
        assert "M=5 N=7 D=32 float32" in text
    assert "| v00_naive" in render(small, "github")
    assert f"{small['v03'].counters.shuffles:,}" in render(small, "github")


def test_json_holds_everything(small):
    data = json.loads(render(small, "json"))
    assert data["problem"] == {
        "batch": 1, "heads": 2, "kv_heads": 1, "queries": 5, "keys": 7, "head_dim": 32, "dtype": "float32",
        "causal": False, "scale": None, "device": "cpu", "seed": 0, "source": None,
    }  # fmt: skip
    assert data["torch"] == torch.__version__ and data["baseline"] == "sdpa"
    assert [row["name"] for row in data["rows"]] == ["v00_naive", "v03_warp_local", "sdpa"]
    row = data["rows"][1]
    assert row["counters"]["shuffles"] == small["v03"].counters.shuffles > 0
    assert (row["status"], row["error"], row["microseconds"]) == ("right", small["v03"].error, None)
    assert data["rows"][2]["counters"] is None


def test_csv_holds_every_figure(small):
    rows = list(csv.DictReader(io.StringIO(render(small, "csv"))))
    assert [row["name"] for row in rows] == ["v00_naive", "v03_warp_local", "sdpa"]
    assert float(rows[1]["error"]) == small["v03"].error
    assert int(rows[1]["shared_load_wavefronts"]) == small["v03"].counters.shared_load_wavefronts
    assert rows[2]["shared_load_wavefronts"] == "" and rows[2]["microseconds"] == ""


def test_numbers_that_json_cannot_hold_become_null(small):
    row = Row("mine.cu", "Mine", "wrong", error=math.nan, pytorch_error=1e-7, limit=math.inf)
    data = json.loads(
        render(Comparison(SMALL, [row], "mine.cu"), "json"), parse_constant=lambda name: pytest.fail(name)
    )
    assert data["rows"][0]["error"] is None and data["rows"][0]["limit"] is None


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.cells, self.text = [], [], ""

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.text += text
        if self.open and self.open[-1] == "td":
            self.cells[-1] += text


def test_html_is_balanced_and_escapes_names_and_notes(pretended_gpu):
    pretended_gpu.rows[2].name = "<b>&.cu"
    for text in (render(pretended_gpu, "html"), pretended_gpu._repr_html_()):
        assert "<no>" not in text and "<b>&.cu" not in text
        page = Tags()
        page.feed(text.removeprefix("<!doctype html>"))
        assert page.open == []
        assert "<b>&.cu" in page.cells and "v00_naive" in page.cells
        assert 'RuntimeError: <no> & "why"' in page.text


def test_a_pipe_in_a_name_does_not_break_markdown(small):
    row = Row("a|b.cu", "Mine", error=1e-7, pytorch_error=1e-7, limit=1e-6)
    (line,) = [x for x in render(Comparison(SMALL, [row], "a"), "github").splitlines() if "b.cu" in x]
    assert "a\\|b.cu" in line


def test_an_unknown_format_is_refused(small):
    with pytest.raises(ValueError, match="format is 'pdf': accepted are simple, github, html, csv, json"):
        render(small, "pdf")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (17, "17"), (9999, "9999"), (10000, "10k"), (123456, "123.5k"), (5898240, "5.898M"), (4e13, "40T")],
)
def test_short_numbers(number, text):
    assert comparing.short(number) == text


# ---------------------------------------------------------------------------------------------- diff


def test_diff_shows_what_turns_the_parent_into_the_version():
    found = diff("v03")
    old, new = (ft.version(name).source.read_text().splitlines() for name in ("v02", "v03"))
    assert (found.old, found.new) == ("v02_fa2.cu", "v03_warp_local.cu")
    assert len(new) - len(old) == found.added - found.removed
    assert {line[1:] for line in found.lines[2:] if line[0] == "+"} <= set(new)
    assert {line[1:] for line in found.lines[2:] if line[0] == "-"} <= set(old)
    assert found.summary == f"v02_fa2.cu → v03_warp_local.cu: +{found.added} −{found.removed} lines"


def test_diff_of_a_readers_file(tmp_path, wrong):
    found = diff(wrong, "v02")
    assert (found.added, found.removed) == (1, 1)
    assert diff(wrong).old == "v01_fa1.cu"
    with pytest.raises(ValueError, match="v00_naive is where the ladder starts: it has no parent"):
        diff("v00")


def test_diff_in_html_escapes_the_source():
    text = diff("v03").html()
    assert "template &lt;int D&gt;" in text and "<int" not in text
    page = Tags()
    page.feed(text)
    assert page.open == []
