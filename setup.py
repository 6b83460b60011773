"""Builds every version's libraries: `python setup.py build_ext --inplace`, or `pip install -e . --no-build-isolation`.

What is there already, built from the same sources, is kept (`--force` builds it again), and what is stale is removed.
MAX_JOBS limits how many compilers run at once; TORCH_CUDA_ARCH_LIST ("8.0;9.0+PTX") chooses the GPUs.
"""

import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # pip does not put it there
from flash_tutorial import build  # noqa: E402
from flash_tutorial.versions import VERSIONS  # noqa: E402

BACKENDS = [backend for backend in build.BACKENDS if backend != "cuda" or build.nvcc()]


class KernelExtension(Extension):
    """One version's library for one backend."""

    def __init__(self, version, backend):
        super().__init__(f"flash_tutorial._lib.{version.name}_{backend}", sources=[])
        self.version, self.backend = version, backend


class BuildKernels(build_ext):
    """Calls flash_tutorial.build, as a kernel's first use does, instead of setuptools' compiler."""

    def run(self):
        if not self.inplace and not self.editable_mode:
            say("not built now: an installed copy builds a kernel when it is first used")
            return
        try:
            build.torch_include()
        except build.BuildError as error:
            say(f"not built now, but when a kernel is first used: {error}; pip sees it with --no-build-isolation")
            return
        common = [("emulator", build.runtime), ("binding for CPU tensors", partial(build.binding, "emulated"))]
        if "cuda" in BACKENDS:
            say(f"nvcc is {build.nvcc()}; GPUs of compute capability {', '.join(build.architectures())}")
            common.append(("binding for CUDA tensors", partial(build.binding, "cuda")))
        else:
            say("there is no nvcc on the PATH or under CUDA_HOME: only the emulated kernels are built, for CPU tensors")
        kernels = [
            (f"{each.version.name}, {each.backend}", partial(build.library, each.version, each.backend))
            for each in self.extensions
        ]

        self.started, self.done, self.total = time.monotonic(), 0, len(common) + len(kernels)
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
            try:
                # The bindings first: every kernel is linked to one.
                built = [*pool.map(self.make, common), *pool.map(self.make, kernels)]
            except (build.BuildError, ValueError) as error:
                pool.shutdown(cancel_futures=True)
                raise CompileError(str(error)) from error
        for path in set(build.LIBRARIES.iterdir()) - set(built):
            say(f"removing {path.name}, which is stale")
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def make(self, job):
        """Builds one file and says so; the file, or None where nvcc cannot build anything on this machine."""
        name, build_file = job
        started, before = time.monotonic(), set(build.LIBRARIES.glob("*"))
        try:
            path = build_file(directory=build.LIBRARIES, force=bool(self.force))
            built = self.force or path not in before
            news = f"built in {time.monotonic() - started:.1f} s" if built else "is up to date"
        except build.BuildError:
            if "cuda" not in name or (trouble := build.nvcc_trouble()) is None:
                raise
            path, news = None, f"not built, for nvcc does not work here, so CUDA tensors will be refused:\n{trouble}"
        self.done += 1
        say(f"[{time.monotonic() - self.started:3.0f} s, {self.done:2}/{self.total}] {name}: {news}")
        return path

    def get_outputs(self):
        return []

    def get_output_mapping(self):
        return {}


class BuildPackage(build_py):
    """Takes the kernels' sources along where the package is not used from this directory."""

    def run(self):
        super().run()
        if not self.editable_mode:
            shutil.copytree(ROOT / "kernels", Path(self.build_lib, "flash_tutorial", "kernels"), dirs_exist_ok=True)


def say(text):
    print(text, flush=True)


setup(
    ext_modules=[KernelExtension(version, backend) for version in VERSIONS for backend in BACKENDS],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildPackage},
)
