"""What `make` does before there is anything to test: its checks of the machine, and the environment it makes."""

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("demo", "test", "test-full", "lab", "build", "docs", "lint", "format", "setup", "clean", "help")
TOOLS = ("date", "echo", "expand", "false", "find", "printf", "rm", "sed", "sh", "test", "uname")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
needs_venv = pytest.mark.skipif(importlib.util.find_spec("ensurepip") is None, reason="this Python has no ensurepip")


@pytest.fixture
def machine(tmp_path):
    """A folder to be the whole PATH, with the commonest tools; a test adds g++ and python3, or stand-ins for them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in (*TOOLS, "make"):
        if found := shutil.which(tool):
            (folder / tool).symlink_to(found)
    return folder


def script(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def make(machine: Path, *words: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {"PATH": str(machine), "HOME": str(machine), **variables}
    venv = machine.parent / "venv"
    return subprocess.run(
        [machine / "make", f"VENV={venv}", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("words", [(), ("help",)])
def test_make_alone_prints_every_target(machine, words):
    done = make(machine, *words)
    assert done.returncode == 0, done.stderr
    for target in TARGETS:
        assert f"  make {target} " in done.stdout
    for variable in ("PYTHON=", "PIP_ARGS=", "ARGS=", "VENV="):
        assert variable in done.stdout


@pytest.mark.parametrize("target", ["test", "test-full"])
def test_the_readers_arguments_come_last(machine, target):
    """-n 0 undoes -n auto: the last one counts."""
    done = make(machine, "--dry-run", target, "ARGS=-n 0 -k v03")
    assert done.returncode == 0, done.stderr
    assert re.search(r"pytest .*-n auto .*-n 0 -k v03$", done.stdout, flags=re.MULTILINE)


def test_without_python_it_names_the_package(machine):
    script(machine / "g++", "exit 0")
    done = make(machine, "demo")
    assert done.returncode != 0
    assert "Python 3.11 or newer (python3 is not here" in done.stdout
    assert "apt install python3 python3-venv" in done.stdout
    assert "dnf install python3" in done.stdout
    assert "pacman -S python" in done.stdout
    assert "g++" not in done.stdout


def test_an_old_python_is_refused_with_its_release(machine):
    script(machine / "g++", "exit 0")
    old = "import sys; sys.version_info = (3, 8, 10, 'final', 0); exec(sys.argv[1])"
    script(machine / "python3", f'exec {sys.executable} -c "{old}" "$2"')
    done = make(machine, "test")
    assert done.returncode != 0
    assert "Python 3.11 or newer (python3 is 3.8)" in done.stdout
    assert "apt install python3.11 python3.11-venv" in done.stdout


def test_without_the_venv_module_it_names_the_package(machine, tmp_path):
    script(machine / "g++", "exit 0")
    (machine / "python3").symlink_to(sys.executable)
    (tmp_path / "ensurepip.py").write_text("raise ImportError('as on a Debian without python3-venv')")
    done = make(machine, "demo", PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert f"apt install python3.{sys.version_info.minor}-venv" in done.stdout


def test_without_a_compiler_it_names_the_package(machine):
    (machine / "python3").symlink_to(sys.executable)
    done = make(machine, "demo")
    assert done.returncode != 0
    assert "Missing: g++" in done.stdout
    assert "apt install g++" in done.stdout
    assert "dnf install gcc-c++" in done.stdout
    assert "pacman -S gcc" in done.stdout


@pytest.mark.parametrize("target", [target for target in TARGETS if target not in ("clean", "help")])
def test_macos_is_shown_the_container(machine, target):
    script(machine / "uname", "echo Darwin")
    done = make(machine, target)
    assert done.returncode != 0
    assert "This is Darwin" in done.stdout
    assert "docker build -t flash-tutorial ." in done.stdout
    assert "Reopen in Container" in done.stdout


# ------------------------------------------------------------------------------------------------- the environment


def wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel of one module, as small as pip takes it."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{member},,\n" for member in (*files, f"{info}/RECORD"))
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in files.items():
            archive.writestr(member, text)
    return path


class Workshop:
    """A folder with wheels, a requirements file and, once made, an environment."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.venv = folder / "venv"
        self.python = self.venv / "bin" / "python"
        self.requirements = folder / "requirements.txt"
        self.requirements.write_text("torch==2.13.0  # pinned\nprobe==1.0\n")
        wheel(folder / "wheels", "torch", "2.13.0")
        wheel(folder / "wheels", "probe", "1.0")
        wheel(folder / "wheels", "probe", "1.1")

    def start(self, python=sys.executable, chosen=True, pip_args=None) -> subprocess.Popen:
        options = ["--chosen"] if chosen else []
        return subprocess.Popen(
            [
                python,
                ROOT / "tools" / "environment.py",
                "--venv",
                self.venv,
                "--requirements",
                self.requirements,
                *options,
            ],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.folder),
                "PIP_ARGS": pip_args or f"--no-index --find-links {self.folder / 'wheels'}",
                "PIP_CONFIG_FILE": os.devnull,
                "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def make(self, python=sys.executable, chosen=True) -> str:
        process = self.start(python, chosen)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return output

    def has(self, module: str) -> str:
        """The version of `module` in the environment and the folder it comes from."""
        code = f"import pathlib, {module} as m; print(m.__version__, pathlib.Path(m.__file__).parents[1])"
        return subprocess.check_output([self.python, "-c", code], text=True, cwd=self.folder).strip()


@pytest.fixture
def workshop(tmp_path):
    return Workshop(tmp_path)


def parent(folder: Path, torch: str) -> Path:
    """The interpreter of a virtual environment that has probe 1.0 and the named version of (a stand-in for) torch."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    packages = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    for name, version in (("torch", torch), ("probe", "1.0")):
        with zipfile.ZipFile(wheel(folder / "wheels", name, version)) as archive:
            archive.extractall(packages)
    return python


@pytest.fixture
def bare(tmp_path):
    """An interpreter without torch, whatever the one has that runs the tests."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    return tmp_path / "bare" / "bin" / "python"


@needs_venv
def test_an_environment_is_made_once_and_again_when_the_requirements_change(workshop, bare):
    output = workshop.make(bare)
    assert "2.7 GB" in output and "PIP_ARGS=" in output  # the size of the download, and how to choose another
    assert workshop.has("torch") == f"2.13.0 {site(workshop)}"
    assert workshop.has("probe").startswith("1.0 ")
    assert workshop.make(bare) == ""
    assert workshop.make(workshop.python, chosen=False) == ""
    workshop.requirements.write_text("torch==2.13.0\nprobe==1.1\n")
    assert "was made for other requirements: making it afresh" in workshop.make(workshop.python, chosen=False)
    assert workshop.has("probe").startswith("1.1 ")


def site(workshop: Workshop) -> Path:
    return next(workshop.venv.glob("lib/python3*/site-packages"))


@needs_venv
def test_a_new_enough_torch_is_kept_even_if_its_interpreter_is_a_virtual_environments(workshop):
    python = parent(workshop.folder / "parent", "2.11.0+cu130")
    output = workshop.make(python)
    assert f"Keeping PyTorch 2.11.0+cu130 of {python}" in output
    assert "GB" not in output
    assert workshop.has("torch").startswith("2.11.0+cu130 ")
    assert not list(site(workshop).glob("torch*"))
    assert workshop.has("probe") == f"1.0 {site(workshop)}"  # a pin is installed even if that interpreter has it too


@needs_venv
def test_an_old_torch_is_not(workshop):
    workshop.make(parent(workshop.folder / "parent", "2.9.1"))
    assert workshop.has("torch") == f"2.13.0 {site(workshop)}"


@needs_venv
@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_making_is_known_and_made_good(workshop, bare, blow):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # an index that takes pip's call and never answers
        silent.settimeout(120)
        process = workshop.start(bare, pip_args=f"--index-url http://127.0.0.1:{silent.getsockname()[1]}/")
        call, _ = silent.accept()
        os.killpg(process.pid, blow)
        output, _ = process.communicate(timeout=60)
        call.close()
    assert process.returncode != 0
    assert workshop.python.exists()
    if blow == signal.SIGINT:
        assert "Run make again to go on" in output
    assert "is unfinished: making it afresh" in workshop.make(bare)
    assert workshop.has("torch") == f"2.13.0 {site(workshop)}"
    assert workshop.has("probe").startswith("1.0 ")


@needs_venv
def test_a_failing_pip_is_not_taken_for_success(workshop, bare):
    workshop.requirements.write_text("torch==2.13.0\nnowhere==1.0\n")
    process = workshop.start(bare)
    output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "No matching distribution found for nowhere==1.0" in output
    assert "run make again" in output
    assert json.loads((workshop.venv / "flash-tutorial.json").read_text())["requirements"] is None


@needs_venv
def test_another_interpreter_makes_it_afresh_only_if_the_reader_names_it(workshop, bare):
    workshop.make(bare)
    other = parent(workshop.folder / "other", "2.12.0")
    assert workshop.make(other, chosen=False) == ""
    assert f"was made with {bare}: making it afresh" in workshop.make(other)
    assert workshop.has("torch").startswith("2.12.0 ")


@needs_venv
def test_an_environment_whose_python_is_gone_is_made_afresh(workshop, bare):
    workshop.make(bare)
    workshop.python.unlink()
    workshop.python.symlink_to("/nowhere/python3")
    assert "has no Python that runs: making it afresh" in workshop.make(bare)
    assert workshop.has("probe").startswith("1.0 ")


@needs_venv
def test_the_readers_own_environment_is_installed_into_and_never_removed(workshop, bare):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", workshop.venv], check=True)
    (workshop.venv / "note").write_text("mine")
    assert "which make did not make" in workshop.make(bare)
    assert workshop.has("probe").startswith("1.0 ")
    workshop.requirements.write_text("probe==1.1\n")
    workshop.make(bare)
    assert workshop.has("probe").startswith("1.1 ")
    assert (workshop.venv / "note").read_text() == "mine"


def test_a_folder_that_is_no_environment_is_left_alone(workshop):
    workshop.venv.mkdir()
    (workshop.venv / "thesis.tex").write_text("mine")
    process = workshop.start()
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "make did not put it there" in output
    assert (workshop.venv / "thesis.tex").read_text() == "mine"
