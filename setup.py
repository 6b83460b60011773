"""Builds every version's libraries: `python setup.py build_ext --inplace`, or `pip install -e . --no-build-isolation`.

What is there already, built from the same sources, is kept (`--force` builds it again), and what is stale is removed.
MAX_JOBS limits how many compilers run at once; TORCH_CUDA_ARCH_LIST ("8.0;9.0+PTX") chooses the GPUs.
"""

import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
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
            say(
                f"not built now: {error}, and add --no-build-isolation for pip to see it. First use builds a kernel too"
            )
            return
        if "cuda" in BACKENDS:
            say(f"nvcc is {build.nvcc()}, for GPUs of compute capability {', '.join(build.architectures())}")
        else:
            say(
                "there is no nvcc (on the PATH or under CUDA_HOME): only the emulated kernels are built, for CPU tensors"
            )

        self.started, self.done = time.monotonic(), 0
        common = {"the emulator": build.runtime}
        for backend in {"cuda": "cuda", "cpu": "emulated"}.values():
            if backend in BACKENDS:
                common[f"the binding ({backend})"] = lambda backend=backend, **options: build.binding(
                    backend, **options
                )
        kernels = {
            f"{extension.version.name} ({extension.backend})": lambda extension=extension, **options: build.library(
                extension.version, extension.backend, **options
            )
            for extension in self.extensions
        }
        self.total = len(common) + len(kernels)
        with ThreadPoolExecutor(jobs()) as pool:
            try:
                # The bindings first: every kernel is linked to one.
                built = [*pool.map(self.make, common.items()), *pool.map(self.make, kernels.items())]
            except build.BuildError as error:
                pool.shutdown(cancel_futures=True)
                raise CompileError(str(error)) from error
        for path in set(build.LIBRARIES.iterdir()) - set(built):
            say(f"removing {path.name}, which is stale")
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def make(self, item):
        name, make = item
        started = time.monotonic()
        path = make(directory=build.LIBRARIES, force=bool(self.force))
        seconds = time.monotonic() - started
        self.done += 1
        state = "is up to date" if seconds < 0.1 else f"built in {seconds:.1f} s"
        say(f"[{time.monotonic() - self.started:3.0f} s, {self.done:2}/{self.total}] {name} {state}")
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


def jobs():
    """How many compilers may run at once."""
    return int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)


def say(text):
    print(text, flush=True)


setup(
    ext_modules=[KernelExtension(version, backend) for version in VERSIONS for backend in BACKENDS],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildPackage},
)
