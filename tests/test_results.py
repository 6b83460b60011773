"""Stored figures: what is kept of a run, what is read back, and what is refused."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from flash_tutorial import build, results, versions

GPU = {"name": "NVIDIA Test 1", "driver_version": "1.0"}
SHAPE = {"batch": 1, "heads": 2, "kv_heads": 2, "seq": 512, "head_dim": 64, "dtype": "float32", "causal": False}
MORE = {  # that a row of each kind has
    "times": {"microseconds": {"median": 2.0, "p20": 1.5, "p80": 2.5}, "warmup": 5, "repetitions": 30},
    "profiles": {"queries": 512, "keys": 512, "duration_us": 1.5, "dram_read_bytes": 3, "counters": {"mma": 1}},
    "counters": {"queries": 512, "keys": 512, "emulator": {"mma": 1}, "hardware": {"mma": 1}, "reasons": {}},
    "tuning": {"kernel_hash": "1", "tiles": "64x64", "own": None},
}
KINDS = {"times": "test_1.json"} | {kind: f"{kind}/test_1.json" for kind in ("profiles", "counters", "tuning")}


def row(version="v00_naive", figure=1.0, **more):
    return {"version": version, **SHAPE, "figure": figure, **more}


def append(folder, *rows, kind="times", **more):
    rows = [{**MORE[kind], **each} for each in rows]
    return results.append(kind, rows, where=GPU, folder=folder, **more)


def newest(folder, kind="times"):
    return {each["version"]: each for each in results.newest(kind, lambda row: row["seq"], folder)}


@pytest.mark.parametrize(
    ("name", "stem"), [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", "rtx_3080_ti_laptop_gpu")]
)
def test_a_file_is_named_after_the_gpu(name, stem):
    assert results.gpu_stem(name) == stem


@pytest.mark.parametrize("kind", KINDS)
def test_runs_are_added_and_the_newest_row_of_each_is_read(tmp_path, kind):
    folder = tmp_path / "results"
    append(folder, row(figure=1.0), row("sdpa", 2.0), kind=kind)
    path = append(folder, row(figure=3.0), kind=kind, ceilings={"copy_tb_s": 4.0})
    assert path == folder / KINDS[kind] and len(json.loads(path.read_text())["runs"]) == 2
    rows = newest(folder, kind)
    assert (rows["v00_naive"]["figure"], rows["sdpa"]["figure"]) == (3.0, 2.0)
    assert rows["v00_naive"]["gpu"] == "NVIDIA Test 1"
    assert rows["v00_naive"]["run"]["ceilings"] == {"copy_tb_s": 4.0} and "ceilings" not in rows["sdpa"]["run"]
    assert rows["sdpa"]["run"]["environment"] == GPU and "rows" not in rows["sdpa"]["run"]
    assert list(path.parent.iterdir()) == [path], "nothing unfinished is left behind"
    assert all(not newest(folder, other) for other in KINDS if other != kind)


def test_rows_with_another_key_stand_beside_each_other(tmp_path):
    append(tmp_path, row(), row() | {"seq": 1024})
    assert [each["seq"] for each in results.newest("times", lambda row: row["seq"], tmp_path)] == [512, 1024]


def test_a_row_of_a_kernel_that_has_changed_since_is_stale(tmp_path):
    current = build.source_hash(versions.find("v00"))
    rows = row(kernel_hash=current), row("v01_fa1", kernel_hash="0123456789"), row("sdpa"), row("v99", kernel_hash="1")
    append(tmp_path, *rows)
    stale = {name: each["stale"] for name, each in newest(tmp_path).items()}
    assert stale == {"v00_naive": False, "v01_fa1": True, "sdpa": False, "v99": True}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ('{"format": 99, "runs": []}', "format 99; this version reads format 1"),
        ("[]", "format None"),
        ('{"format": 1, "gpu": "NVIDIA Test 1"}', "is damaged"),
        ('{"format": 1, "gpu": "NVIDIA Test 1", "runs": [{"rows": []}]}', "is damaged"),
        ('{"format": 1, "gpu": "NVIDIA Test 1", "runs": [{"date": "2026-01-02", "rows": 3}]}', "is damaged"),
        ("\ud800", "is damaged"),
        ("[" * 10**5, "is damaged"),
        ('{"format": 1, "gpu": "NVIDIA Test 2", "runs": []}', "of 'NVIDIA Test 2', whose file is test_2.json"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_and_kept(tmp_path, text, message):
    path = tmp_path / "test_1.json"
    content = text.encode("utf-8", "surrogatepass")
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        results.runs("times", tmp_path)
    with pytest.raises(ValueError, match=message):
        results.check("times", GPU["name"], tmp_path)
    with pytest.raises(ValueError, match=message):
        append(tmp_path, row())
    assert path.read_bytes() == content


STRANGE = (None, -1, 1.5, "x", True, [], {}, {"a": None}, float("nan"), 10**400)


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_is_not_what_it_should_be_is_damage(tmp_path, kind):
    path = append(tmp_path, row(), kind=kind, ceilings={"tflops": {"float32": 50.0}, "copy_tb_s": 4.0})
    whole = path.read_text()
    fields = {"rows", "ceilings", "environment", *json.loads(whole)["runs"][0]["rows"][0]} - {"figure"}
    for name in fields:
        refused = 0
        for value in STRANGE:
            document = json.loads(whole)
            run = document["runs"][0]
            (run if name in run else run["rows"][0])[name] = value
            path.write_text(json.dumps(document))
            try:
                results.runs(kind, tmp_path)
            except ValueError as error:
                assert str(path) in str(error) and "is damaged" in str(error) and len(str(error)) < 300
                refused += 1
        assert refused >= len(STRANGE) - 2, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_lacks_what_its_kind_has_is_damage(tmp_path, kind):
    path = append(tmp_path, row(), kind=kind)
    whole = path.read_text()
    for name in results._NEEDED[kind]:
        document = json.loads(whole)
        del document["runs"][0]["rows"][0][name]
        path.write_text(json.dumps(document))
        with pytest.raises(ValueError, match=f"is damaged .*lacks {name}"):
            results.runs(kind, tmp_path)


def test_runs_that_several_processes_add_at_once_are_all_kept(tmp_path):
    code = (
        "import pathlib, sys; from flash_tutorial import results; folder, name = sys.argv[1:]\n"
        f"for n in range(10): results.append('times', [], where={GPU}, folder=pathlib.Path(folder), of=name)"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, tmp_path, str(n)]) for n in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    runs = [run["of"] for run in results.runs("times", tmp_path)]
    assert sorted(runs) == sorted("0123" * 10)
    assert [path.name for path in tmp_path.iterdir()] == ["test_1.json"]


def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path):
    before = append(tmp_path, row()).read_text()
    with pytest.raises(TypeError):
        append(tmp_path, row(figure={1, 2}))  # JSON knows no sets
    assert [each.read_text() for each in tmp_path.iterdir()] == [before]


def test_no_results_are_no_rows(tmp_path):
    assert results.runs("times", tmp_path) == [] and newest(tmp_path) == {}


def test_what_is_committed_can_be_read():
    assert all({"gpu", "date", "environment", "rows"} <= set(run) for kind in KINDS for run in results.runs(kind))


# ---------------------------------------------------------------------------------------------- the environment


@pytest.fixture
def pretended_gpu(monkeypatch):
    """A GPU, of which nvidia-smi says what `answers` holds."""
    answers = SimpleNamespace(stdout="580.1, 1980 MHz, 1980 MHz, 700.00 W, P0\n", returncode=0, asked=None)

    def run(command, **options):
        answers.asked = command
        return answers

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test 1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))
    monkeypatch.setattr(subprocess, "run", run)
    return answers


def test_the_environment_is_that_of_the_gpu_in_use(pretended_gpu):
    found = results.environment()
    assert pretended_gpu.asked[-2:] == ["-i", "GPU-uuid-3"]
    assert (found["name"], found["clocks.sm"], found["pstate"]) == ("NVIDIA Test 1", "1980 MHz", "P0")
    assert found["torch"] == torch.__version__ and {"cuda", "cudnn", "driver_version", "power.limit"} <= set(found)


def test_the_state_is_one_line(pretended_gpu):
    pretended_gpu.stdout = "1755 MHz, 690.12 W, 61, P0\n"
    assert results.gpu_state() == "1755 MHz, 690.12 W, 61, P0"


@pytest.mark.parametrize("trouble", ["missing", "refusing"])
def test_without_nvidia_smi_the_rest_is_kept(monkeypatch, pretended_gpu, trouble, original=subprocess.run):
    pretended_gpu.returncode, pretended_gpu.stdout = 9, "No devices were found"
    if trouble == "missing":
        monkeypatch.setenv("PATH", "")
        monkeypatch.setattr(subprocess, "run", original)
    assert results.gpu_state() == ""
    assert set(results.environment()) == {"name", "torch", "cuda", "cudnn"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_tells_its_environment():
    assert results.environment()["name"] == torch.cuda.get_device_name()


def test_reading_needs_no_torch():
    code = "import sys; from flash_tutorial import results; results.runs('times'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
