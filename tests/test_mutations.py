"""The tests' own test: kernels with one mistake each, made on a scratch copy, which the suite has to catch.

Every mutation in mutations.py must occur in the kernel's text, must change the code that the compiler makes of it, and
must fail one of the cases that test_attention.py runs, judged by the same `check`. `pytest -rP` shows which one.
"""

import functools
import subprocess
from pathlib import Path

import attention_cases as cases
import pytest
from mutations import MUTATIONS

import flash_tutorial as ft
from flash_tutorial import build
from flash_tutorial.versions import KERNELS

ALL = [(name, mistake) for name, mistakes in MUTATIONS.items() for mistake in mistakes]


@functools.cache
def built_code(source: Path) -> str:
    """What the compiler makes of a kernel file: assembly, without debug information and the file's directory."""
    flags = ["-std=c++17", "-O2", "-g0", f"-fmacro-prefix-map={source.parent}=.", "-x", "c++"]
    includes = ["-I", str(KERNELS / "include"), "-I", str(KERNELS)]
    command = [build.cxx(), *flags, *includes, "-S", str(source), "-o", "-"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def first_catch(source: Path, dtypes) -> tuple[cases.Case, Exception] | None:
    """The suite's first case that `source` fails, and how it fails; None if it passes them all."""
    for case in cases.suite(dtypes):
        try:
            cases.check(source, case)
        except (AssertionError, ft.KernelFinding) as error:
            return case, error
    return None


def test_every_version_has_ten_mutations():
    assert list(MUTATIONS) == [version.name for version in ft.versions()]
    assert min(map(len, MUTATIONS.values())) >= 10


def test_a_comment_changes_no_code(tmp_path):
    """Otherwise "the mistake changes the built code", below, would say nothing."""
    source = ft.edit("v03", {"// Run ": "// To run: "}, out=tmp_path)
    assert built_code(source) == built_code(ft.version("v03").source)


@pytest.mark.parametrize("name, mistake", ALL)
def test_mistake_is_caught(name, mistake, tmp_path):
    version = ft.version(name)
    source = ft.edit(name, MUTATIONS[name][mistake], out=tmp_path)
    assert built_code(source) != built_code(version.source), "the mistake changes nothing in the built code"
    caught = first_catch(source, version.dtypes)
    assert caught, f"{name} with this mistake passes the whole suite: {mistake}"
    case, error = caught
    print(f"{name}, {mistake}: caught by {case}\n{type(error).__name__}: {error}")
