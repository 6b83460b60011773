"""Versions as data, names and paths, the lazy import, and a kernel edited in a running process."""

import json
import os
import subprocess
import sys

import pytest
import torch

import flash_tutorial as ft
from flash_tutorial import build, registry, versions

# ------------------------------------------------------------------------------------------------------------ the data


def test_every_version_is_complete():
    for number, version in enumerate(ft.versions()):
        assert version.number == number
        assert version.name.startswith(f"v{number:02}_")
        assert version.source.is_file()
        assert version.title and version.idea.endswith(".")
        assert version.parent in (None, *(earlier.name for earlier in ft.versions()[:number]))
        assert sorted(version.head_dims) == list(version.head_dims)
        assert hasattr(torch.ops.flash_tutorial, version.name)
    assert ft.versions()[0].parent is None


def test_every_kernel_file_is_a_version():
    assert sorted(path.stem for path in versions.KERNELS.glob("*.cu")) == [version.name for version in ft.versions()]


def test_readme_of_the_kernels_is_current():
    assert (versions.KERNELS / "README.md").read_text(encoding="utf-8") == versions.readme(), "run `make docs`"


# ----------------------------------------------------------------------------------------------------- names and paths


@pytest.mark.parametrize(
    "name",
    [2, "2", "v2", "V02", "v02_fa2", "fa2", "FlashAttention-2", "flash attention 2", " v02 "],
)
def test_a_version_is_found_by(name):
    assert ft.version(name) is ft.versions()[2]


def test_a_part_that_only_one_name_has_is_enough():
    assert ft.version("vector").name == "v04_vectorized"
    assert ft.version("local").name == "v03_warp_local"


@pytest.mark.parametrize(
    "name, near",
    [
        ("v03_warp_lokal", ["v03_warp_local"]),
        ("vectorised", ["v04_vectorized"]),
        ("naiv3", ["v00_naive"]),
        ("fa", ["v01_fa1", "v02_fa2"]),  # more than one: which?
    ],
)
def test_an_unknown_name_is_refused_with_the_near_matches(name, near):
    with pytest.raises(ValueError) as caught:
        ft.version(name)
    assert f"did you mean {' or '.join(near)}?" in str(caught.value)


@pytest.mark.parametrize("name", ["v99", 99, -1, "-1", "", "zebra"])
def test_a_name_like_no_other_is_refused_with_all_there_are(name):
    with pytest.raises(ValueError, match=f"'{name}'.*v00_naive, v01_fa1.*v04_vectorized"):
        ft.version(name)


@pytest.fixture
def own(tmp_path):
    """Makes a reader's kernel file of a given name, with v02's text."""

    def make(name):
        path = tmp_path / name
        path.write_text(ft.version("v02").source.read_text())
        return path

    return make


@pytest.mark.parametrize("name", ["my_v03.cu", "v3.cu", "v03_warp_local.cu", "v03-faster.cu"])
def test_a_file_is_like_the_version_in_its_name(own, name):
    path = own(name)
    version = registry.resolve(str(path))
    assert (version.source, version.name) == (path, path.stem)
    like = ft.version("v03")
    assert (version.dtypes, version.head_dims, version.parent) == (like.dtypes, like.head_dims, like.parent)


def test_a_file_is_like_the_version_it_is_said_to_be(own):
    assert registry.resolve(own("mine.cu"), like="v02").parent == "v01_fa1"
    assert registry.resolve(own("my_v03.cu"), like="v02").parent == "v01_fa1"


def test_a_file_that_is_like_nothing_is_refused(own):
    with pytest.raises(ValueError, match=r"mine\.cu.*like='v03'"):
        registry.resolve(own("mine.cu"))
    with pytest.raises(ValueError, match="v77"):
        registry.resolve(own("my_v77.cu"))
    with pytest.raises(ValueError, match="did you mean v03_warp_local"):
        registry.resolve(own("mine.cu"), like="warp_lokal")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no kernel file.*my_v03\.cu"):
        registry.resolve(str(tmp_path / "my_v03.cu"))


@pytest.mark.parametrize("version", [None, True, 3.0, ["v03"]])
def test_what_is_no_name_is_refused(version):
    with pytest.raises(TypeError, match="version must be a name"):
        registry.resolve(version)


# ----------------------------------------------------------------------------------------------------- scratch copies


def test_edit_changes_a_copy():
    source = ft.version("v02").source
    before = source.read_text()
    line = next(line for line in before.splitlines() if line.strip() and before.count(line) == 1)
    path = ft.edit("v02", {line: "// changed"})
    assert path.name == source.name and path.parent != source.parent
    assert path.read_text() == before.replace(line, "// changed")
    assert source.read_text() == before


def test_edit_goes_where_it_is_told(tmp_path):
    assert ft.edit("v02", {}, out=tmp_path) == tmp_path / "v02_fa2.cu"
    assert ft.edit("v02", {}, out=tmp_path / "other.cu") == tmp_path / "other.cu"
    assert (
        ft.edit(tmp_path / "other.cu", {}, out=tmp_path / "v01.cu").read_text() == ft.version("v02").source.read_text()
    )
    with pytest.raises(ValueError, match="is the kernel itself"):
        ft.edit("v02", {}, out=ft.version("v02").source)


@pytest.mark.parametrize("old, times", [("no such text", "0 times"), ("float", r"\d\d+ times"), ("", "0 times")])
def test_edit_refuses_what_does_not_occur_exactly_once(old, times):
    with pytest.raises(ValueError, match=f"exactly once in v02_fa2.cu.*{times}"):
        ft.edit("v02", {old: "x"})


# ------------------------------------------------------------------------------------------------- in a fresh process


def python(code, **environment):
    """What a new Python prints, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_takes_no_torch_and_little_time():
    code = """
import json, sys, time
started = time.perf_counter()
import flash_tutorial
names = [version.name for version in flash_tutorial.versions()]
print(json.dumps([time.perf_counter() - started, "torch" in sys.modules, "numpy" in sys.modules, names]))
"""
    seconds, torch_there, numpy_there, names = python(code)
    assert seconds < 0.5 and not torch_there and not numpy_there
    assert names == [version.name for version in ft.versions()]


@pytest.mark.parametrize("imports", ["import flash_tutorial, torch", "import torch, flash_tutorial"])
def test_operators_exist_whichever_is_imported_first(imports):
    code = f"""
import json
{imports}
print(json.dumps([hasattr(torch.ops.flash_tutorial, v.name) for v in flash_tutorial.versions()]))
"""
    assert python(code) == [True] * len(ft.versions())


def test_import_needs_no_tools_and_no_library(tmp_path):
    """Without a compiler, with nothing built: all is there until a kernel is run, which says what is missing."""
    code = """
import json, pathlib
import torch
import flash_tutorial as ft
from flash_tutorial import build
build.LIBRARIES = pathlib.Path("/nonexistent")
ft.emulator, ft.reference, ft.edit, ft.KernelFinding, ft.attention
try:
    ft.attention(*torch.randn(3, 1, 1, 4, 32), version="v00")
except ft.BuildError as error:
    print(json.dumps(str(error)))
"""
    nothing = tmp_path / "bin"
    nothing.mkdir()
    message = python(code, PATH=str(nothing), CXX="", FLASH_TUTORIAL_CACHE=str(tmp_path / "cache"))
    assert "g++" in message and "apt install g++" in message


# ------------------------------------------------------------------------------------------------------ edit and rerun


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, so that what is run has to be built."""
    monkeypatch.setenv("FLASH_TUTORIAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def inputs():
    return torch.randn(3, 1, 2, 9, 32, generator=torch.Generator().manual_seed(0))


def test_a_readers_own_file_runs(own):
    q, k, v = inputs()
    expected = ft.attention(q, k, v, version="v02")
    assert torch.equal(ft.attention(q, k, v, version=str(own("my_v02.cu"))), expected)
    assert torch.equal(ft.attention(q, k, v, version=own("mine.cu"), like="fa2"), expected)


def test_an_edited_kernel_is_rebuilt_in_the_same_process(own):
    q, k, v = inputs()
    path = own("my_v02.cu")
    original = path.read_text()
    expected = ft.attention(q, k, v, version=path)
    launcher = "FLASH_REGISTER(launch)"
    assert original.count(launcher) == 1
    wrapped = (
        "void launch_doubled(const flash::Params& params, void* stream) {\n"
        "    flash::Params doubled = params;\n    doubled.scale *= 2;\n    launch(doubled, stream);\n}\n"
        "FLASH_REGISTER(launch_doubled)"
    )
    for text, scale in ((original.replace(launcher, wrapped), 2.0), (original, 1.0)):
        path.write_text(text)
        out = ft.attention(q, k, v, version=path)
        reference = ft.attention(q, k, v, version="v02", scale=scale / 32**0.5)
        torch.testing.assert_close(out, reference, atol=1e-6, rtol=0)
    assert torch.equal(out, expected)


def test_an_edited_header_is_noticed(own):
    q, k, v = inputs()
    path = own("my_v02.cu")
    header = path.with_name("mine.cuh")
    header.write_text("#define FACTOR 2\n")
    text = path.read_text().replace("FLASH_REGISTER(launch)", "")
    path.write_text(
        text + '#include "mine.cuh"\n'
        "void launch_scaled(const flash::Params& params, void* stream) {\n"
        "    flash::Params scaled = params;\n    scaled.scale *= FACTOR;\n    launch(scaled, stream);\n}\n"
        "FLASH_REGISTER(launch_scaled)\n"
    )
    doubled = ft.attention(q, k, v, version=path)
    header.write_text("#define FACTOR 1\n")
    assert not torch.equal(ft.attention(q, k, v, version=path), doubled)
    assert torch.equal(ft.attention(q, k, v, version=path), ft.attention(q, k, v, version="v02"))


def test_a_compiler_error_shows_the_readers_lines(own):
    path = own("my_v02.cu")
    broken = "float nonsense = undeclared_name;"
    path.write_text(path.read_text() + broken + "\n")
    line = len(path.read_text().splitlines())
    with pytest.raises(ft.BuildError) as caught:
        ft.attention(*inputs(), version=path)
    message = str(caught.value)
    assert f"{path}:{line}:" in message and broken in message and "undeclared_name" in message


@pytest.mark.parametrize(
    "without, symbol",
    [
        (lambda text: text.replace("FLASH_REGISTER(launch)", ""), "flash_"),
        (
            lambda text: text.replace(
                "    flash::dispatch", "    extern void nowhere();\n    nowhere();\n    flash::dispatch"
            ),
            "nowhere",
        ),
    ],
    ids=["no registration", "no definition"],
)
def test_a_file_that_lacks_something_does_not_load_and_says_what(own, without, symbol):
    path = own("my_v02.cu")
    path.write_text(without(path.read_text()))
    with pytest.raises(ft.BuildError, match=rf"my_v02.*undefined symbol: .*{symbol}.*end in FLASH_REGISTER\(launch\)"):
        ft.attention(*inputs(), version=path)


def test_a_name_with_odd_characters_works(own):
    q, k, v = inputs()
    path = own("my kernel [1] v02é.cu")
    assert torch.equal(ft.attention(q, k, v, version=path), ft.attention(q, k, v, version="v02"))


def test_an_own_file_is_built_once(own, cache):
    q, k, v = inputs()
    path = own("my_v02.cu")
    ft.attention(q, k, v, version=path)
    built = {file: file.stat().st_mtime_ns for file in cache.glob("*.so")}
    assert [file.name for file in built if file.name.startswith("my_v02-")]
    assert build.library(registry.resolve(path), "emulated") in built
    ft.attention(q, k, v, version=path)
    assert {file: file.stat().st_mtime_ns for file in cache.glob("*.so")} == built
