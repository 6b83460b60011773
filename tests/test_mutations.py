"""The tests' own test: kernels with one mistake each, made on a scratch copy, which the suite has to catch.

Every mutation in mutations.py must occur in the kernel's text, must change the code that the compiler makes of it, and
must fail one of the cases that test_attention.py runs, judged by the same `check`. `pytest -rP` shows which one. A
kernel is compiled for the cases of one dtype and one compiled head size at a time: most mistakes show in the first few.
"""

import functools
import subprocess
from pathlib import Path
from typing import NamedTuple

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


# What stands, in a copy of a kernel, for the functions that compile it for every head size, dtype and tile shape. The
# cases are so small that a kernel takes the first of its shapes.
ONLY = """\
#include "flash/fragment.cuh"
#include "flash/launch.cuh"
#include "flash/shape.cuh"
namespace only {
template <class Body>
void dispatch_element(flash::Dtype, Body body) { body(%(element)s()); }
template <class Body>
void dispatch_head_dim(int, Body body) { body(std::integral_constant<int, %(head_dim)d>()); }
template <class Shapes, int ONLY, class Body>
void dispatch_shape(int tiles, Body body) { flash::dispatch_shape<Shapes, ONLY == -1 ? 0 : ONLY>(tiles, body); }
}
"""
ELEMENTS = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}


class Part(NamedTuple):
    """Cases of the suite that take one kernel: a version's for one compiled head size and one dtype."""

    head_dim: int
    dtype: str
    cases: list[cases.Case]

    def of(self, source: Path, folder: Path) -> Path:
        """A copy of a kernel file, in `folder`, that is compiled for this part only."""
        copy = folder / f"{self.dtype}-{self.head_dim}" / source.name
        copy.parent.mkdir()
        (copy.parent / "only.cuh").write_text(ONLY % {"element": ELEMENTS[self.dtype], "head_dim": self.head_dim})
        text = source.read_text().replace("flash::dispatch_", "only::dispatch_")
        copy.write_text(f'#include "only.cuh"\n{text}')
        return copy


def parts(version: ft.Version) -> list[Part]:
    """The whole suite of a version, the cheapest cases of each part first."""
    found = {(head_dim, dtype): [] for head_dim in version.head_dims for dtype in version.dtypes}
    for case in cases.suite(version.dtypes):
        padded = min(size for size in version.head_dims if size >= case.head_dim)
        found[padded, case.dtype].append(case)
    return [Part(head_dim, dtype, each) for (head_dim, dtype), each in found.items()]


def first_catch(source: Path, version: ft.Version, folder: Path) -> tuple[Part, cases.Case, Exception] | None:
    """The suite's first case that `source` fails, and how it fails; None if it passes them all."""
    for part in parts(version):
        kernel = part.of(source, folder)
        for case in part.cases:
            try:
                cases.check(kernel, case)
            except (AssertionError, ft.KernelFinding) as error:
                return part, case, error
    return None


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The kernel of a part without a mistake."""
    kernels = {}

    def get(version: ft.Version, part: Part) -> Path:
        key = version.name, part.head_dim, part.dtype
        if key not in kernels:
            kernels[key] = part.of(version.source, tmp_path_factory.mktemp("sound"))
        return kernels[key]

    return get


def test_every_version_has_ten_mutations():
    assert list(MUTATIONS) == [version.name for version in ft.versions()]
    assert min(map(len, MUTATIONS.values())) >= 10


def test_a_comment_changes_no_code(tmp_path):
    """Otherwise "the mistake changes the built code", below, would say nothing."""
    source = ft.edit("v03", {"// Run ": "// To run: "}, out=tmp_path)
    assert built_code(source) == built_code(ft.version("v03").source)


@pytest.mark.parametrize("name, mistake", ALL)
def test_mistake_is_caught(name, mistake, sound, tmp_path):
    version = ft.version(name)
    source = ft.edit(name, MUTATIONS[name][mistake], out=tmp_path)
    caught = first_catch(source, version, tmp_path)
    if caught is None:
        assert built_code(source) != built_code(version.source), "the mistake changes nothing in the built code"
        raise AssertionError(f"{name} with this mistake passes the whole suite: {mistake}")
    part, case, error = caught
    cases.check(sound(version, part), case)  # so it is the mistake that was caught, and it changes the built code
    print(f"{name}, {mistake}: caught by {case}\n{type(error).__name__}: {error}")
