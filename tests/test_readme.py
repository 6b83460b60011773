"""README.md tells the truth: its tables are current, its links lead somewhere, its commands are taken."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import flash_tutorial
from flash_tutorial import charts
from flash_tutorial.versions import VERSIONS
from flash_tutorial.versions import readme as kernels_readme

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("readme", ROOT / "tools" / "readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_tables_are_current(generator):
    path, layer = generator.DEMO
    assert f"--input {path.relative_to(ROOT)} --prefix {layer}" in MAKEFILE  # the tables are of what `make demo` runs
    assert generator.filled(README) == README, "make docs"


def test_the_kernels_table_is_current():
    assert (ROOT / "kernels" / "README.md").read_text() == kernels_readme(), "make docs"


def test_its_pictures_are_current(generator):
    assert generator.pictures()
    for path, picture in generator.pictures().items():
        assert f"]({path.relative_to(ROOT)})" in README
        assert charts.digest_of(path) == picture.digest, "make docs"


def test_a_change_of_a_table_is_noticed(generator):
    changed = README.replace(VERSIONS[1].idea, "Something else.")
    assert changed != README
    assert generator.filled(changed) == README


def test_it_opens_with_the_two_commands():
    first = re.search(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    assert re.findall(r"^make \w+", first[1], flags=re.MULTILINE) == ["make demo", "make test"]
    assert README[: first.start()].count("\n\n") == 2  # the title and one paragraph before them


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)", README))))
def test_every_link_inside_the_repository_leads_somewhere(link):
    assert (ROOT / link).exists()


def test_the_package_says_what_each_module_is_for():
    modules = [path.stem for path in (ROOT / "flash_tutorial").glob("[!_]*.py")]
    _, _, listed = flash_tutorial.__doc__.partition("The modules,")
    assert [name for name in modules if not re.search(rf"\b{name}\b", listed)] == []


def test_every_make_target_exists():
    named = set(re.findall(r"(?:^|`|flash-tutorial )make ([a-z-]+)", README, flags=re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
    assert {"demo", "test", "lab", "docs", "lint"} <= named
    assert named <= targets


# Runs as it is in this folder, installed or not.
FROM_HERE = {**os.environ, "PYTHONPATH": str(ROOT)}


def commands() -> list[str]:
    blocks = "".join(re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL))
    found = re.findall(r"^\.venv/bin/flash-tutorial (.*)$", blocks, flags=re.MULTILINE)
    return [command for command in found if "--device cuda" not in command]  # which needs a GPU, and ncu


@pytest.mark.parametrize("command", commands())
def test_its_commands_run(command, tmp_path):
    (tmp_path / "my_v03.cu").write_bytes((ROOT / "kernels" / "v03_warp_local.cu").read_bytes())
    words = [sys.executable, "-m", "flash_tutorial", *shlex.split(command, comments=True)]
    done = subprocess.run(words, cwd=tmp_path, env=FROM_HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_python_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=FROM_HERE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "v03_warp_local.cu" in done.stdout
