"""The command line: what each command prints, refuses, and exits with."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from command import call, refused
from safetensors.torch import save_file

import flash_tutorial as ft
from flash_tutorial import build, doctor
from flash_tutorial.cli import main

REAL_INPUT = Path(__file__).parent / "data" / "minilm_qkv.safetensors"
SMALL = ["--queries", "5", "--keys", "7", "--head-dim", "32", "--heads", "2", "--kv-heads", "1"]
COMMANDS = [
    *("list", "run", "compare", "bench", "tune", "diff"),
    *("profile", "inspect", "hardware", "roofline", "plot", "doctor"),
]
WIDTH = 100  # columns that a reader's terminal has


def in_a_process(*arguments, **options):
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=120, cwd=Path.cwd(), **options
    )


@pytest.fixture
def copy(tmp_path):
    """Makes a copy of v02 with one text replaced, as a reader would."""

    def make(name: str, old: str = "Bottleneck", new: str = "Bottleneck") -> Path:
        text = ft.version("v02").source.read_text()
        assert old in text
        (tmp_path / name).write_text(text.replace(old, new))
        return tmp_path / name

    return make


# ---------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(command):
    result = call(command, "--help")
    assert result.exit_code == 0
    examples = result.stdout.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert len(examples) >= 2 and all(f"flash-tutorial {command}" in line for line in examples)
    statuses = result.stdout.partition("Exit status:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in statuses] == ["0", "1", "2"]
    assert max(map(len, result.stdout.splitlines())) <= WIDTH


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_in_help_are_commands_that_exist(command):
    """Every option in an example is one of the command's."""
    text = call(command, "--help").stdout
    examples = text.partition("Examples:\n")[2].partition("\n\n")[0]
    used = {word for word in examples.partition("|")[0].split() if word.startswith("--")}
    known = {name for parameter in main.commands[command].params for name in parameter.opts}
    assert used <= known


def test_the_overview_names_every_command():
    text = call("--help").stdout
    assert all(f"flash-tutorial {command}" in text for command in COMMANDS)
    assert sorted(main.commands) == sorted(COMMANDS)


def test_an_unknown_command_is_refused():
    assert "No such command 'fly'" in refused("fly")


# ---------------------------------------------------------------------------------------------- list


def test_list_json():
    entries = json.loads(call("list", "--format", "json").stdout)
    assert [entry["name"] for entry in entries] == [version.name for version in ft.versions()]
    for entry, version in zip(entries, ft.versions(), strict=True):
        assert list(entry) == [
            "name", "number", "title", "idea", "parent", "dtypes", "head_dims", "min_arch", "cuda_built", "emulated",
        ]  # fmt: skip
        for key in ("name", "number", "title", "idea", "parent", "min_arch"):
            assert entry[key] == getattr(version, key)
        assert entry["dtypes"] == list(version.dtypes) and entry["head_dims"] == list(version.head_dims)
        assert entry["cuda_built"] is (build.find_library(version, "cuda") is not None)
        assert entry["emulated"] is (build.find_library(version, "emulated") is not None)


def test_list_variants():
    entries = json.loads(call("list", "--variants", "--format", "json").stdout)
    assert {entry["version"] for entry in entries} == {version.name for version in ft.versions() if version.options}
    assert {"version": "v04_vectorized", "option": "pad", "values": ["4", "0"]}.items() <= entries[1].items()
    text = call("list", "--variants").stdout
    assert all(re.search(rf"{entry['version']} +{entry['option']} ", text) for entry in entries)


def test_list_tells_what_is_built(monkeypatch):
    monkeypatch.setattr(build, "find_library", lambda version, backend: version.source if backend == "cuda" else None)
    assert [(e["cuda_built"], e["emulated"]) for e in json.loads(call("list", "--format", "json").stdout)] == [
        (True, False) for _ in ft.versions()
    ]


@pytest.mark.parametrize("fmt", ["simple", "github"])
def test_list_for_people(fmt):
    text = call("list", "--format", fmt).stdout
    assert all(version.name in text for version in ft.versions())
    assert fmt == "github" or max(map(len, text.splitlines())) <= WIDTH


def test_list_imports_no_torch_and_answers_at_once():
    script = (
        "import sys; from flash_tutorial.cli import main; main(['list', '--format', 'json'], standalone_mode=False); "
        "print('torch' in sys.modules, 'numpy' in sys.modules, file=sys.stderr)"
    )
    took = []
    for _ in range(3):  # the best of three: other tests run beside this one
        start = time.perf_counter()
        done = in_a_process("-c", script)
        took.append(time.perf_counter() - start)
        assert (done.returncode, done.stderr.strip()) == (0, "False False")
        assert len(json.loads(done.stdout)) == len(ft.versions())
    assert min(took) < 0.5


# ---------------------------------------------------------------------------------------------- run


def test_run_shows_the_error_beside_pytorchs_and_the_counters():
    result = call("run", "v03", *SMALL, "--causal", "--lines")
    assert result.exit_code == 0 and result.stderr == ""
    for word in ("v03_warp_local", "causal", "right", "PyTorch's", "limit", "shuffles", "shared load wavefronts"):
        assert word in result.stdout
    assert "P_smem[warp_row + r]" in result.stdout  # a source line
    assert max(map(len, result.stdout.splitlines())) <= WIDTH


def test_run_json():
    result = call("run", "3", *SMALL, "--scale", "-0.5", "--seed", "7", "--lines", "--format", "json")
    data = json.loads(result.stdout)
    (row,) = data["rows"]
    assert data["problem"]["scale"] == -0.5 and data["problem"]["seed"] == 7 and data["problem"]["kv_heads"] == 1
    assert row["status"] == "right" and 0 <= row["error"] <= row["limit"] and row["findings"] == []
    for counter in ("shuffles", "global_load_bytes", "shared_load_wavefronts"):
        assert sum(line["counters"][counter] for line in row["lines"]) == row["counters"][counter] > 0
    source = ft.version("v03").source.read_text().splitlines()
    own = [line for line in row["lines"] if line["file"].endswith("v03_warp_local.cu")]
    assert own and all(source[line["line"] - 1].strip() == line["text"] for line in own)


def test_run_on_a_files_tensors(tmp_path):
    result = call("run", "v02", "--input", REAL_INPUT, "--prefix", "layer0", "--format", "json")
    problem = json.loads(result.stdout)["problem"]
    assert result.exit_code == 0
    assert [problem[name] for name in ("batch", "heads", "queries", "keys", "head_dim")] == [1, 12, 127, 127, 32]
    assert problem["source"] == "minilm_qkv.safetensors, layer0" and problem["seed"] is None
    small = {"q": torch.zeros(1, 1, 2, 8), "k": torch.zeros(1, 1, 3, 8), "v": torch.ones(1, 1, 3, 8)}
    save_file(small, tmp_path / "small.safetensors")
    assert call("run", "v00", "--input", tmp_path / "small.safetensors").exit_code == 0


def test_run_a_readers_kernel(copy):
    assert call("run", copy("my_v02.cu"), *SMALL).exit_code == 0
    assert call("run", copy("mine.cu"), *SMALL, "--like", "v02").exit_code == 0
    assert "does not say which version it is like" in refused("run", copy("mine.cu"), *SMALL)


def test_run_a_wrong_kernel(copy):
    result = call("run", copy("wrong_v02.cu", "dot * params.scale", "dot * params.scale * 2"), *SMALL)
    assert result.exit_code == 1
    assert "wrong" in result.stdout and "instead of" in result.stdout


def test_run_a_racy_kernel_names_the_lines(copy):
    path = copy("racy_v02.cu", "__syncthreads();  // S is whole", ";  // S is whole")
    result = call("run", path, "--queries", "40", "--keys", "40", "--head-dim", "32")
    assert result.exit_code == 1
    assert "finding" in result.stdout and "data race" in result.stdout and "racy_v02.cu:" in result.stdout
    assert "S_smem" in result.stdout  # the source line itself
    data = json.loads(call("run", path, *SMALL[2:], "--queries", "40", "--format", "json").stdout)
    assert "race" in {finding["kind"] for finding in data["rows"][0]["findings"]}


def test_run_a_kernel_that_does_not_compile_shows_the_readers_line(copy):
    result = call("run", copy("broken_v02.cu", "dot * params.scale", "dot * params.no_such_field"), *SMALL)
    assert result.exit_code == 1
    assert "broken_v02.cu:" in result.stdout and "dot * params.no_such_field" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["v33"], "unknown version 'v33'"),
        (["warp_locale"], "did you mean v03_warp_local?"),
        (["sdpa"], "sdpa is not one version: `flash-tutorial compare` takes it"),
        (["all"], "all is not one version"),
        (["nowhere/v03.cu"], "there is no kernel file 'nowhere/v03.cu'"),
        (["v03", "--dtype", "float16"], "dtype is float16: v03_warp_local takes float32"),
        (["v03", "--dtype", "float8"], "'float8' is not one of 'float32', 'float16', 'bfloat16'"),
        (["v03", "--head-dim", "129"], "head_dim is 129: v03_warp_local takes 1 to 128"),
        (["v03", "--head-dim", "0"], "head_dim is 0: it has to be a whole number, 1 or more"),
        (["v03", "--queries", "-3"], "queries is -3"),
        (["v03", "--queries", "many"], "'many' is not a valid integer"),
        (["v03", "--heads", "6", "--kv-heads", "4"], "heads is 6 and kv_heads is 4"),
        (["v03", "--scale", "nan"], "scale is nan: any number that is finite in float32 is accepted"),
        (["v03", "--scale", "1e39"], "scale is 1e+39: any number that is finite in float32 is accepted"),
        (["v03", "--queries", "9" * 20], "queries is 99999999999999999999: it has to be a whole number, 0 or more, be"),
        (["v03", "--seed", "9" * 20], "seed is 99999999999999999999: a whole number of 64 bits is accepted"),
        (["v03", "--device", "tpu"], "'tpu' is not one of 'cpu', 'cuda'"),
        (["v03", "--like", "nothing"], "unknown version 'nothing'"),
        (["v03", "--input", "nowhere.safetensors"], "nowhere.safetensors is not there"),
        (["v03", "--input", str(REAL_INPUT)], "has no tensor q, k, v: prefixes that it has: layer0, layer1"),
        (["v03", "--input", str(REAL_INPUT), "--prefix", "layer9"], "has no tensor layer9.q, layer9.k, layer9.v"),
        (["v03", "--input", str(REAL_INPUT), "--heads", "2", "--seed", "1"], "--heads, --seed cannot be chosen with"),
        (["v03", "--prefix", "layer0"], "--prefix layer0 needs --input"),
        (["v03", "--format", "csv"], "'csv' is not one of 'simple', 'json'"),
        ([], "Missing argument"),
    ],
)
def test_run_refuses(arguments, message):
    assert message in refused("run", *arguments)


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "damaged.safetensors").write_bytes(REAL_INPUT.read_bytes()[:1000])
    message = refused("run", "v03", "--input", tmp_path / "damaged.safetensors")
    assert "damaged.safetensors is not a whole safetensors file" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused():
    assert "sees no CUDA GPU: use cpu" in refused("run", "v03", "--device", "cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_run_on_a_gpu_shows_the_time():
    result = call("run", "v03", "--device", "cuda")
    assert result.exit_code == 0 and "µs" in result.stdout and "TFLOP/s" in result.stdout
    assert "--lines counts in the emulator" in refused("run", "v03", "--device", "cuda", "--lines")


# ---------------------------------------------------------------------------------------------- compare


def test_compare_prints_a_row_for_each():
    result = call("compare", "v00", "warp_local", "sdpa", *SMALL)
    assert result.exit_code == 0 and result.stderr == ""
    for name in ("v00_naive", "v03_warp_local", "sdpa"):
        (line,) = [line for line in result.stdout.splitlines() if line.startswith(name)]
        assert "right" in line
    assert max(map(len, result.stdout.splitlines())) <= WIDTH


def test_compare_keeps_the_others_when_one_fails(copy):
    broken = copy("broken_v02.cu", "dot * params.scale", "dot * params.no_such_field")
    result = call("compare", broken, "v02", *SMALL, "--format", "json")
    assert result.exit_code == 1
    rows = json.loads(result.stdout)["rows"]
    assert [(row["name"], row["status"]) for row in rows] == [("broken_v02.cu", "failed"), ("v02_fa2", "right")]
    assert "no_such_field" in rows[0]["note"] and rows[0]["error"] is None


@pytest.mark.parametrize(
    ("suffix", "start"), [(".txt", "B=1"), (".md", "B=1"), (".html", "<!doctype"), (".csv", "name,"), (".json", "{")]
)
def test_compare_writes_the_format_that_the_suffix_names(tmp_path, suffix, start):
    out = tmp_path / f"table{suffix}"
    out.write_text("what was there before")
    result = call("compare", "v00", "v02", *SMALL, "--out", out)
    assert (result.exit_code, result.stdout) == (0, "")
    assert f"{out}: 2 rows" in result.stderr
    text = out.read_text()
    assert text.startswith(start) and "v02_fa2" in text and text.endswith("\n")
    assert list(tmp_path.iterdir()) == [out]  # no draft is left


def test_compare_out_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    out = tmp_path / "table.csv"
    out.write_text("what was there before")

    def full_disk(path, text, **options):
        with open(path, "w") as file:
            file.write(text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    assert "No space left on device" in refused("compare", "baseline", *SMALL, "--out", out)
    assert out.read_text() == "what was there before"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["v00", "v77"], "unknown version 'v77'"),
        (["v00", "sdpa_flsh"], "PyTorch's own are baseline, sdpa, sdpa_flash"),
        (["v00", "3", "v03"], "v03_warp_local comes twice"),
        (["v00", "--baseline", "sdpa"], "the baseline sdpa is not among those compared: v00_naive"),
        (["v00", "--dtype", "bfloat16"], "dtype is bfloat16: v00_naive takes float32"),
        (["v00", "--keys", "-1"], "keys is -1"),
        (["v00", "--out", "table.pdf"], "--out table.pdf ends in '.pdf': accepted are .txt (simple), .md (github)"),
        (["v00", "--out", "table"], "--out table ends in 'no suffix'"),
        (["v00", "--out", "table.md", "--format", "csv"], "--out table.md is for github, but --format is csv"),
        (["v00", "--out", "nowhere/table.md"], "there is no directory nowhere"),
        (["v00", "--format", "pdf"], "'pdf' is not one of 'simple', 'github', 'html', 'csv', 'json'"),
        ([], "Missing argument 'NAMES...'"),
    ],
)
def test_compare_refuses(arguments, message):
    assert message in refused("compare", *arguments)


def test_compare_refuses_a_directory(tmp_path):
    (tmp_path / "table.md").mkdir()
    for out in (tmp_path, tmp_path / "table.md"):
        assert f"--out {out} is a directory: a file name is needed, ending in .txt" in refused(
            "compare", "v00", "--out", out
        )


# ---------------------------------------------------------------------------------------------- diff


def test_diff():
    result = call("diff", "v03")
    assert result.exit_code == 0
    assert result.stdout.startswith("--- v02_fa2.cu\n+++ v03_warp_local.cu\n@@ ")
    assert "\x1b" not in result.stdout  # not a terminal
    assert result.stdout.splitlines()[-1].startswith("v02_fa2.cu → v03_warp_local.cu: +")
    assert call("diff", "v03", "v01").stdout.startswith("--- v01_fa1.cu")


def test_diff_of_a_readers_file(copy):
    path = copy("my_v02.cu", "dot * params.scale", "dot * params.scale * 2")
    assert call("diff", path, "v02").stdout.splitlines()[-1].endswith("my_v02.cu: +1 −1 lines")
    assert call("diff", path).stdout.startswith("--- v01_fa1.cu\n")
    path.write_bytes("// naïve\n".encode("latin-1") + path.read_bytes())
    assert call("diff", path, "v02").stdout.splitlines()[-1].endswith("my_v02.cu: +2 −1 lines")


def test_diff_is_coloured_on_a_terminal_only(monkeypatch):
    def coloured():
        return "\x1b[32m+" in CliRunner().invoke(main, ["diff", "v03"], color=True).stdout

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert coloured()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured()


def test_diff_html():
    text = call("diff", "v03", "--format", "html").stdout
    assert text.startswith("<p>v02_fa2.cu → v03_warp_local.cu: +") and "&lt;int D&gt;" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["v00"], "v00_naive is where the ladder starts: it has no parent. Name what to hold it against"),
        (["v03", "v44"], "unknown version 'v44'"),
        (["nowhere.cu"], "there is no kernel file 'nowhere.cu'"),
    ],
)
def test_diff_refuses(arguments, message):
    assert message in refused("diff", *arguments)


# ---------------------------------------------------------------------------------------------- doctor


def test_doctor_tells_what_is_here():
    result = call("doctor")
    assert result.exit_code == 0
    for word in (sys.executable, torch.__version__, "g++", "addr2line", "nvcc", "The emulator works", "trial"):
        assert word in result.stdout
    assert all(version.name in result.stdout for version in ft.versions())
    data = json.loads(call("doctor", "--format", "json").stdout)
    assert data["works"] is True
    assert {check["state"] for check in data["checks"]} <= {"ok", "absent"}


@pytest.fixture
def bare_machine(tmp_path, monkeypatch):
    """A machine with apt-get and nothing else, no library built."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "apt-get").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "apt-get").chmod(0o755)
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("FLASH_TUTORIAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "libraries")
    monkeypatch.setattr(build, "nvcc", lambda: None)
    return tmp_path


def test_doctor_names_what_is_missing_and_the_command_that_mends_it(bare_machine):
    result = call("doctor")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "Missing: g++."
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert "-> sudo apt-get install -y g++" in lines
    assert "-> sudo apt-get install -y binutils" in lines
    assert max(len(line) for line in result.stdout.splitlines() if "->" not in line) <= WIDTH
    checks = {check["name"]: check for check in json.loads(call("doctor", "--format", "json").stdout)["checks"]}
    assert checks["g++"]["state"] == "missing" and checks["nvcc"]["state"] == "absent"
    assert "trial" not in checks  # there is nothing to try
    assert "not built: cuda, emulated, instrumented" in checks["v00_naive"]["detail"]
    assert checks["v00_naive"]["mend"].endswith("setup.py build_ext --inplace")


def test_doctor_knows_a_library_of_older_source(bare_machine):
    (bare_machine / "libraries").mkdir()
    (bare_machine / "libraries" / "v00_naive-0123456789-emulated.so").touch()
    checks = {check.name: check for check in doctor.examine()}
    assert "out of date: emulated; not built: cuda, instrumented" in checks["v00_naive"].detail


def test_doctor_without_torch(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    checks = {check.name: check for check in doctor.examine()}
    assert (checks["PyTorch"].state, checks["PyTorch"].detail) == ("missing", "not installed")
    assert checks["PyTorch"].mend == f"{sys.executable} -m pip install 'torch>=2.11'"
    assert not doctor.works(list(checks.values()))


def test_doctor_with_a_torch_that_is_too_old(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    check, _ = doctor._torch()
    assert check.state == "missing" and check.detail.endswith("2.11 or later is needed")


def test_doctor_with_a_compiler_that_is_not_gcc(tmp_path, monkeypatch):
    fake = tmp_path / "g++"
    fake.write_text("#!/bin/sh\necho Apple clang version 17\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    check = doctor._compiler()
    assert check.state == "missing" and "Apple clang version 17: the emulator needs GCC" in check.detail


def test_doctor_reports_a_trial_that_fails(monkeypatch):
    def fail(*arguments, **options):
        raise build.BuildError("the compiler said no")

    monkeypatch.setattr(ft, "attention", fail)
    check = doctor._trial(ft.versions()[0])
    assert check.state == "missing" and "the compiler said no" in check.detail


# ---------------------------------------------------------------------------------------------- as a program


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
@pytest.mark.parametrize("arguments", [["list"], ["bench", "--help"], ["diff", "v04"], ["run", "vµΔ"]])
def test_a_terminal_that_lacks_a_character_shows_another(arguments, encoding):
    env = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = in_a_process("-m", "flash_tutorial", *arguments, env=env, encoding=encoding)
    assert done.returncode == 2 * (arguments[0] == "run") and "Traceback" not in done.stderr
    assert "?" in done.stdout + done.stderr


def test_as_a_module_with_a_closed_pipe_and_exit_statuses():
    done = in_a_process("-m", "flash_tutorial", "diff", "v44")
    assert done.returncode == 2 and "Usage: flash-tutorial diff" in done.stderr and "Traceback" not in done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    closed = subprocess.run(
        [sys.executable, "-m", "flash_tutorial", "diff", "v03"], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert "Traceback" not in closed.stderr


def test_compare_shows_its_progress_on_a_terminal_and_only_there():
    terminal, stderr = pty.openpty()
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
    command = [sys.executable, "-m", "flash_tutorial", "compare", "baseline", "sdpa", *SMALL]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=120)
    os.close(stderr)
    assert done.returncode == 0 and "0/2" not in done.stdout
    shown = os.read(terminal, 100_000).decode()
    os.close(terminal)
    assert "0/2" in shown and "baseline:" in shown
    assert call("compare", "baseline", "sdpa", *SMALL).stderr == ""


def test_click_sees_every_option_documented():
    for command in main.commands.values():
        for parameter in command.params:
            assert isinstance(parameter, click.Argument) or parameter.help or parameter.name == "fmt", parameter.name
