"""Stored times: what is kept of a run, what is read back, and what is refused."""

import json

import pytest

from flash_tutorial import benchmark, build, versions

torch = pytest.importorskip("torch")

SHAPE = benchmark.Shape(4, 12, 512, 64)
GPU = {"name": "NVIDIA Test 1", "driver_version": "1.0"}


def row(version="v00_naive", microseconds=100.0, **more):
    return {
        "version": version,
        **benchmark.asdict(SHAPE),
        "error": 1e-7,
        "microseconds": {"median": microseconds, "p20": microseconds, "p80": microseconds},
        "tflops": SHAPE.flops / microseconds / 1e6,
        **more,
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "environment", lambda: dict(GPU))
    return tmp_path / "results"


def test_flops_of_both_products_and_half_of_them_when_causal():
    assert SHAPE.flops == 4 * 4 * 12 * 512 * 512 * 64
    assert benchmark.Shape(4, 12, 512, 64, causal=True).flops * 2 == SHAPE.flops


@pytest.mark.parametrize(
    ("name", "stem"), [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", "rtx_3080_ti_laptop_gpu")]
)
def test_a_results_file_is_named_after_the_gpu(name, stem):
    assert benchmark.gpu_stem(name) == stem


def test_runs_are_added_and_the_newest_row_is_read(folder):
    benchmark.save([row(microseconds=100.0), row("sdpa_efficient", 50.0)], folder)
    path = benchmark.save([row(microseconds=90.0)], folder)
    assert path == folder / "test_1.json" and len(json.loads(path.read_text())["runs"]) == 2
    rows = {each["version"]: each for each in benchmark.load_results(folder)}
    assert rows["v00_naive"]["microseconds"]["median"] == 90.0 and rows["v00_naive"]["gpu"] == "NVIDIA Test 1"
    assert rows["sdpa_efficient"]["microseconds"]["median"] == 50.0
    assert list(folder.iterdir()) == [path], "nothing unfinished is left behind"


def test_a_row_of_a_kernel_that_has_changed_since_is_stale(folder):
    current = build.source_hash(versions.find("v00"))
    benchmark.save([row(kernel_hash=current), row("v01_fa1", kernel_hash="0123456789"), row("sdpa")], folder)
    stale = {each["version"]: each["stale"] for each in benchmark.load_results(folder)}
    assert stale == {"v00_naive": False, "v01_fa1": True, "sdpa": False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ('{"format": 99, "runs": []}', "format 99; this version reads format 1"),
        ("[]", "format None"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_and_kept(folder, text, message):
    folder.mkdir()
    path = folder / "test_1.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        benchmark.load_results(folder)
    with pytest.raises(ValueError, match=message):
        benchmark.save([row()], folder)
    assert path.read_text() == text


def test_no_results_are_no_rows(folder):
    assert benchmark.load_results(folder) == []


def test_a_wrong_contender_gets_no_time(monkeypatch):
    """On the emulator's CPU tensors: only the clock and the tensors' device are pretended."""
    randn, wrong = torch.randn, lambda q, k, v, causal, scale=None: torch.zeros_like(q)
    monkeypatch.setattr(torch, "Generator", lambda device, generator=torch.Generator: generator())
    monkeypatch.setattr(torch, "randn", lambda size, generator, device, dtype: randn(size, dtype=dtype))
    monkeypatch.setattr(benchmark, "measure", lambda functions: {name: benchmark.Timing(2, 1, 3) for name in functions})
    from flash_tutorial import ops

    monkeypatch.setattr(ops, "attention", lambda q, k, v, version, causal: wrong(q, k, v, causal))
    rows = benchmark.run(["v00", "baseline"], [benchmark.Shape(1, 1, 8, 32)], progress=lambda line: None)
    assert "microseconds" not in rows[0] and "exceeds" in rows[0]["wrong"]
    assert rows[1]["microseconds"] == {"median": 2, "p20": 1, "p80": 3}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_measured_on_a_gpu(tmp_path):
    rows = benchmark.run(["v04", "sdpa"], [benchmark.Shape(1, 2, 256, 64)], progress=lambda line: None)
    assert all(each["microseconds"]["p20"] <= each["microseconds"]["median"] for each in rows)
    assert benchmark.load_results(benchmark.save(rows, tmp_path).parent)[0]["gpu"] == torch.cuda.get_device_name()
