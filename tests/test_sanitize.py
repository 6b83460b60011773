"""tools/sanitize.py: what it runs under compute-sanitizer, what it makes of the answers, and what it refuses. The GPU
and compute-sanitizer are pretended."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

import flash_tutorial as ft
from flash_tutorial import build, registry

PATH = Path(__file__).resolve().parents[1] / "tools" / "sanitize.py"
CLEAN = {
    "memcheck": "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
    "synccheck": "========= ERROR SUMMARY: 0 errors\n",
    "initcheck": "========= ERROR SUMMARY: 0 errors\n",
}


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("sanitize", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu(monkeypatch):
    """A pretended GPU of compute capability 9.0; what is built for it is noted by name."""
    built = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test 1")
    monkeypatch.setattr(registry, "operator", lambda version, backend: built.append((version.name, backend)))
    return built


@pytest.fixture
def sanitizer(monkeypatch, tmp_path):
    """A pretended compute-sanitizer on the PATH, clean until a test sets what a tool says and its exit status. It
    answers only if it is asked to watch this Python run the file on a version."""
    answers = {name: (text, 0) for name, text in CLEAN.items()}
    program = tmp_path / "compute-sanitizer"

    def write():
        program.write_text(
            f"#!{sys.executable}\nimport os, sys\n"
            "_, option, tool, *rest = sys.argv\n"
            f"assert option == '--tool' and rest[:5] == ['--error-exitcode', '9', {sys.executable!r}, {str(PATH)!r}, "
            "'--watched'], rest\n"
            f"assert os.environ['PYTHONPATH'].split(os.pathsep)[0] == {str(PATH.parents[1])!r}\n"
            "assert os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] == '1'\n"
            f"text, status = {answers!r}[tool]\n"
            "print(text.replace('NAME', rest[5]), end='')\nsys.exit(status)\n"
        )
        program.chmod(0o755)

    write()
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def answer(tool, text, status):
        answers[tool] = text, status
        write()

    return answer


def refused(tool, capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        tool.main(list(arguments))
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == ""
    return " ".join(said.err.split())


# ---------------------------------------------------------------------------------------------- what is run


@pytest.mark.parametrize("name", ["v04", "v09:tiles=32x32"])
def test_a_version_takes_every_problem(tool, monkeypatch, name):
    """With tensors of the CPU, that is in the emulator."""
    made, calls = registry.operator, []

    def operator(version, backend):
        assert backend == "cuda"
        emulated = made(version, "emulated")

        def called(q, k, v, causal, scale, tiles):
            out, _, _ = emulated(q, k, v, causal, scale, tiles)
            assert out.shape == q.shape and out.isfinite().all()
            calls.append((q.dtype, q.shape[2], k.shape[2], q.shape[3], k.is_contiguous(), tiles))

        return called

    monkeypatch.setattr(registry, "operator", operator)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    version = registry.resolve(name)
    tool.watch(version)
    assert {str(dtype) for dtype, *_ in calls} == {f"torch.{dtype}" for dtype in version.dtypes}
    assert {head_dim for _, _, _, head_dim, _, _ in calls} == set(version.head_dims)
    assert {contiguous for *_, contiguous, _ in calls} == ({True, False} if version.strided else {True})
    assert any(keys == 0 for _, _, keys, *_ in calls) and {tiles for *_, tiles in calls} == {-1}


def test_every_tile_shape_is_asked_for_and_no_head_size_that_is_not_compiled(tool, monkeypatch):
    calls = []
    monkeypatch.setattr(registry, "operator", lambda *_: lambda q, k, v, causal, scale, tiles: calls.append((q, tiles)))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    version = ft.version("v09")
    tool.watch(version)
    assert {number for _, number in calls} == set(range(len(version.tiles)))
    calls.clear()
    tool.watch(type(version)(**{**vars(version), "head_dims": (64, 128)}))
    assert {q.shape[3] for q, _ in calls} == {64, 128}


# ---------------------------------------------------------------------------------------------- what is said of it


def test_what_is_clean_is_a_line_of_the_table(tool, gpu, sanitizer, capsys):
    assert tool.main(["v03", "v04:pad=0", str(build.KERNELS / "v05_tensor_core.cu")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["version", *tool.TOOLS]
    assert [line.split()[0].rpartition("/")[2] for line in lines[2:]] == ["v03", "v04:pad=0", "v05_tensor_core.cu"]
    assert all(line.split()[1:] == ["clean"] * 4 for line in lines[2:])
    assert gpu == [(name, "cuda") for name in ("v03_warp_local", "v04_vectorized:pad=0", "v05_tensor_core")]


def test_without_names_every_version_is_run(tool, gpu, sanitizer, capsys):
    assert tool.main([]) == 0
    names = [version.name for version in ft.versions()]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == names


def test_what_a_tool_finds_is_shown_and_the_exit_status_tells(tool, gpu, sanitizer, capsys):
    sanitizer(
        "racecheck", "========= Error: Race reported in NAME\n========= RACECHECK SUMMARY: 1 hazard displayed\n", 9
    )
    assert tool.main(["v03", "v04"]) == 1
    said = capsys.readouterr().out
    for name in ("v03", "v04"):
        assert f"racecheck {name}\n========= Error: Race reported in {name}" in said
        line = next(line for line in said.splitlines() if line.startswith(f"{name} "))
        assert line.split() == [name, "clean", "finds", "something", "clean", "clean"]
    assert "memcheck v03" not in said


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("Traceback (most recent call last):\n", 1),  # the program under it
        ("========= Error: no CUDA launch was seen\n", 0),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n", 0),
    ],
)
def test_what_did_not_end_well_is_not_clean(tool, gpu, sanitizer, capsys, text, status):
    sanitizer("racecheck", text, status)
    assert tool.main(["v03"]) == 1
    said = capsys.readouterr().out
    assert f"racecheck v03\n{text}(exit status {status})" in said
    assert said.splitlines()[-1].split() == ["v03", "clean", "fails", "clean", "clean"]


def test_a_kernel_that_does_not_compile_is_told(tool, gpu, sanitizer, capsys, monkeypatch):
    def fail(version, backend):
        raise build.BuildError("v03_warp_local.cu:1: error: expected a declaration")

    monkeypatch.setattr(registry, "operator", fail)
    assert tool.main(["v03"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err == "v03_warp_local.cu:1: error: expected a declaration\n"


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("v99", "unknown version 'v99': did you mean v09_adaptive_tiles?"),
        ("v04:pad=3", "v04_vectorized:pad is '3': accepted are 4, 0"),
        ("./none.cu", "there is no kernel file './none.cu'"),
        ("--all", "unrecognized arguments: --all"),
    ],
)
def test_what_there_is_not_is_refused(tool, capsys, argument, message):
    assert message in refused(tool, capsys, argument)


def test_without_a_gpu_it_says_what_can_be_done_instead(tool, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = refused(tool, capsys, "v03")
    assert "needs a CUDA GPU" in said and "sees none: `flash-tutorial run` checks a kernel in the emulator" in said


def test_a_gpu_that_is_too_old_is_named(tool, gpu, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    said = refused(tool, capsys, "v03")
    assert "v03_warp_local needs a GPU of compute capability 8.0 or later; NVIDIA Test 1 has 7.5" in said


def test_without_compute_sanitizer_it_says_where_it_looked(tool, gpu, capsys, monkeypatch):
    monkeypatch.setattr(tool.shutil, "which", lambda name, path=None: None)
    assert "there is no compute-sanitizer: it is not on the PATH, beside nvcc, or in" in refused(tool, capsys, "v03")
    assert gpu == [], "nothing is built for nothing"


def test_it_is_found_beside_nvcc(tool, monkeypatch, tmp_path):
    program = tmp_path / "compute-sanitizer"
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(build, "nvcc", lambda: str(tmp_path / "nvcc"))
    assert tool.find_sanitizer() == str(program)
