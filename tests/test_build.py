"""Building: names that are hashes of contents, architectures, nvcc, and setup.py as a reader runs it."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

import flash_tutorial as ft
from flash_tutorial import build
from flash_tutorial.versions import Version

ROOT = Path(__file__).resolve().parents[1]
needs_nvcc = pytest.mark.skipif(build.nvcc() is None, reason="needs nvcc")


@pytest.fixture
def own(tmp_path):
    """A small kernel of a reader's, with a header beside it, that includes what all kernels include."""
    (tmp_path / "mine.cuh").write_text("#define THREADS 32\n")
    source = tmp_path / "my_v00.cu"
    source.write_text(
        '#include "flash/launch.cuh"\n#include "mine.cuh"\n'
        "namespace {\n"
        "__global__ void zero_kernel(flash::Params params) { params.lse[threadIdx.x] = 0; }\n"
        "void launch(const flash::Params& params, void* stream) {\n"
        "    flash::launch(zero_kernel, dim3(1), dim3(THREADS), 0, stream, params);\n}\n"
        "}  // namespace\nFLASH_REGISTER(launch)\n"
    )
    return Version(0, "my_v00", "Mine", "Zeros.", None, own=source)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_TUTORIAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --------------------------------------------------------------------------------------------------- names by contents


def test_dependencies_are_the_includes_that_are_found(own):
    names = {path.name for path in build.dependencies(own.source, "emulated")}
    assert {"my_v00.cu", "mine.cuh", "launch.cuh", "params.cuh", "cuda.h"} <= names
    assert "stdexcept" not in names
    on_gpu = {path.name for path in build.dependencies(own.source, "cuda")}
    assert {"my_v00.cu", "mine.cuh", "launch.cuh", "params.cuh"} <= on_gpu
    assert not [path for path in build.dependencies(own.source, "cuda") if build.EMULATOR in path.parents]


def test_a_library_is_found_under_the_hash_of_its_contents_only(own, cache):
    assert build.find_library(own, "emulated") is None
    built = build.library(own, "emulated")
    assert built.parent == cache and build.find_library(own, "emulated") == built
    assert build.find_library(own, "instrumented") is None

    stamp = built.stat().st_mtime_ns
    assert build.library(own, "emulated") == built and built.stat().st_mtime_ns == stamp
    assert build.library(own, "emulated", force=True) == built and built.stat().st_mtime_ns > stamp

    header = own.source.with_name("mine.cuh")
    text = header.read_text()
    header.write_text("#define THREADS 64\n")
    assert build.find_library(own, "emulated") is None
    other = build.library(own, "emulated")
    assert other != built and build.operator_name(other) != build.operator_name(built)
    header.write_text(text)
    assert build.find_library(own, "emulated") == built


def test_the_same_text_elsewhere_is_another_library(own, cache, tmp_path):
    """Reports quote a kernel's lines from the path in its library's line table."""
    (tmp_path / "elsewhere").mkdir()
    for name in ("my_v00.cu", "mine.cuh"):
        shutil.copy(tmp_path / name, tmp_path / "elsewhere")
    elsewhere = Version(0, "my_v00", "Mine", "Zeros.", None, own=tmp_path / "elsewhere" / "my_v00.cu")
    assert build.library(own, "emulated") != build.library(elsewhere, "emulated")
    assert build.source_hash(own) == build.source_hash(elsewhere)


def test_the_hash_of_the_sources_sees_every_change(own):
    before = build.source_hash(own)
    own.source.write_text(own.source.read_text() + "\n")
    after = build.source_hash(own)
    own.source.with_name("mine.cuh").write_text("#define THREADS 64\n")
    assert len({before, after, build.source_hash(own)}) == 3


def test_nothing_is_left_of_a_build_that_fails(own, cache):
    own.source.write_text("this is no C++\n")
    with pytest.raises(ft.BuildError, match=r"my_v00\.cu:1:"):
        build.library(own, "emulated")
    assert not [path for path in cache.iterdir() if path.name.startswith((".build", "my_v00"))]


def test_a_cache_that_cannot_be_written_is_named(own, monkeypatch):
    monkeypatch.setenv("FLASH_TUTORIAL_CACHE", str(own.source / "cache"))  # in a file, where no directory can be made
    with pytest.raises(ft.BuildError, match=r"my_v00\S*\.so cannot be built in .*FLASH_TUTORIAL_CACHE"):
        build.library(own, "emulated")


def test_two_at_once_build_once(own, cache, monkeypatch):
    compiled = []
    compile_one = build._compile
    monkeypatch.setattr(build, "_compile", lambda *arguments: (compiled.append(arguments), compile_one(*arguments)))
    threads = [threading.Thread(target=build.library, args=(own, "emulated")) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1 and build.find_library(own, "emulated")


def test_an_unknown_backend_is_refused(own):
    with pytest.raises(ValueError, match="'gpu'.*cuda, emulated, instrumented"):
        build.library(own, "gpu")


def test_the_cache_is_where_it_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASH_TUTORIAL_CACHE", str(tmp_path))
    assert build.cache_dir() == tmp_path
    monkeypatch.delenv("FLASH_TUTORIAL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_dir() == tmp_path / "flash-tutorial"


@pytest.mark.parametrize("closed", ["home", "home/.cache/flash-tutorial"])
def test_somebody_elses_cache_is_not_used(monkeypatch, tmp_path, closed):
    closed, stat, access = str(tmp_path / closed), os.stat, os.access

    def refusing(path, *arguments, **options):
        if str(path).startswith(f"{closed}/"):
            raise PermissionError(13, "Permission denied", path)
        return stat(path, *arguments, **options)

    cache = tmp_path / "home" / ".cache"
    (cache / "flash-tutorial").mkdir(parents=True)
    monkeypatch.delenv("FLASH_TUTORIAL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert build.cache_dir() == cache / "flash-tutorial"
    monkeypatch.setattr(os, "stat", refusing)
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(closed) and access(path, mode))
    assert build.cache_dir() == Path(tempfile.gettempdir()) / f"flash-tutorial-{os.getuid()}"


# ------------------------------------------------------------------------------------------------------- architectures


@pytest.mark.parametrize(
    "text, archs",
    [
        ("8.0;9.0", ("8.0", "9.0")),
        ("8.0 9.0", ("8.0", "9.0")),
        ("8.0, 8.6", ("8.0", "8.6")),
        ("9.0+PTX", ("9.0+PTX",)),
        ("9.0a", ("9.0a",)),
        ("Ampere;Hopper", ("8.0", "8.6", "9.0")),
        ("Ampere+PTX", ("8.0", "8.6+PTX")),
        ("8.0;8.0", ("8.0",)),
        ("12.0", ("12.0",)),
    ],
)
def test_architecture_lists(text, archs, monkeypatch):
    assert build.architectures(text) == archs
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    assert build.architectures() == archs


@pytest.mark.parametrize("text", ["sm_80", "8", "8.0+SASS", "Pascal", "80"])
def test_what_is_no_architecture_is_refused(text):
    with pytest.raises(ValueError, match="TORCH_CUDA_ARCH_LIST"):
        build.architectures(text)


def test_without_a_list_there_is_a_default(monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert [build.capability(arch) for arch in build.architectures()] == [(8, 0), (8, 6), (8, 9), (9, 0)]


def test_a_version_is_built_for_what_it_runs_on():
    plain = Version(0, "v00", "", "", None, min_arch="8.6")
    assert build.version_archs(plain, ("8.0", "8.6", "10.0")) == ("8.6", "10.0")
    hopper = Version(11, "v11", "", "", None, archs=("9.0a",))
    assert build.version_archs(hopper, ("8.0", "9.0")) == ("9.0a",)


@pytest.mark.parametrize(
    "arch, gpu, runs",
    [
        ("8.0", (8, 0), True),
        ("8.0", (8, 9), True),  # machine code runs on later minor numbers
        ("8.6", (8, 0), False),
        ("8.9", (9, 0), False),  # and on no other major number
        ("9.0+PTX", (12, 0), True),
        ("9.0+PTX", (8, 9), False),
        ("9.0a", (9, 0), True),
        ("9.0a", (10, 0), False),
    ],
)
def test_which_gpu_a_library_runs_on(arch, gpu, runs, own, cache):
    name = f"my_v00-{build._library_hash(own.source, 'cuda')}-cuda-7.5-{arch.replace('+', '')}.so"
    cache.mkdir()
    (cache / name).touch()
    assert (build.find_library(own, "cuda", gpu) is not None) is runs
    assert build.find_library(own, "cuda") is not None


@needs_nvcc
def test_nvcc_builds_without_a_gpu(own, cache):
    library = build.library(own, "cuda", ["8.0", "9.0+PTX"])
    assert library.name.endswith("-cuda-8.0-9.0PTX.so")
    assert build.find_library(own, "cuda", (9, 0)) == library
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cuda.so" in needed and "libcudart" not in needed


@needs_nvcc
def test_an_error_of_nvcc_shows_the_readers_line(own, cache):
    own.source.write_text(own.source.read_text() + "float nonsense = undeclared_name;\n")
    with pytest.raises(ft.BuildError, match=r"my_v00\.cu\(\d+\): error.*\n.*float nonsense = undeclared_name;"):
        build.library(own, "cuda", ["8.0"])


def test_without_nvcc_the_error_says_what_to_install(own, cache, monkeypatch):
    monkeypatch.setattr(build, "nvcc", lambda: None)
    with pytest.raises(ft.BuildError, match="no nvcc.*CUDA toolkit.*CUDA_HOME"):
        build.library(own, "cuda", ["8.0"])


def test_nvcc_is_found_under_cuda_home(monkeypatch, tmp_path):
    tool = tmp_path / "bin" / "nvcc"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build.nvcc() == str(tool)


@pytest.mark.parametrize("choice", ["clang++", "/usr/bin/clang"])
def test_a_compiler_that_is_no_gcc_is_not_taken(choice, monkeypatch):
    monkeypatch.setenv("CXX", choice)
    assert Path(build.cxx()).name == "g++"


@pytest.mark.parametrize("name", ["g++-13", "x86_64-conda-linux-gnu-c++", "aarch64-linux-gnu-g++-12"])
def test_a_gcc_that_is_named_is_taken(name, monkeypatch, tmp_path):
    compiler = tmp_path / name
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert build.cxx() == str(compiler)


# ------------------------------------------------------------------------------------------------------------ setup.py


def test_setup(tmp_path):
    """In a copy of the repository with one version and an empty emulator, on a machine whose nvcc does not work."""
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("flash_tutorial", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("_lib", "__pycache__"))
    for source in (tmp_path / "kernels" / "emulator").glob("*.cpp"):
        source.write_text("")
    with open(tmp_path / "flash_tutorial" / "versions.py", "a") as versions:
        versions.write("\nVERSIONS = VERSIONS[:1]\n")
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho unsupported GNU version\nexit 1\n")
    nvcc.chmod(0o755)

    def run(*options):
        environment = {**os.environ, "CUDA_HOME": str(nvcc.parents[1]), "FLASH_TUTORIAL_CACHE": str(tmp_path / "cache")}
        command = [sys.executable, "setup.py", "build_ext", "--inplace", *options]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    first = run()
    assert "v00_naive, emulated: built" in first and "v00_naive, instrumented: built" in first
    assert "v00_naive, cuda: not built, for nvcc does not work here" in first and "unsupported GNU version" in first
    libraries = tmp_path / "flash_tutorial" / "_lib"
    kept = sorted(libraries.glob("*.so"))
    assert [path.name.split("-")[0] for path in kept] == ["libflash_emulator", "v00_naive", "v00_naive"]
    assert not list((tmp_path / "cache").glob("*.so"))

    stale = libraries / "v00_naive-0123456789-emulated.so"
    stale.touch()
    second = run()
    assert "v00_naive, emulated: is up to date" in second and f"removing {stale.name}" in second
    assert sorted(libraries.glob("*.so")) == kept
    assert "v00_naive, emulated: built" in run("--force")

    source = tmp_path / "kernels" / "v00_naive.cu"
    source.write_text("this is no C++\n")
    with pytest.raises(AssertionError, match=r"v00_naive\.cu:1:"):
        run()
