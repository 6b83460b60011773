"""FlashAttention, one step at a time: every version of the ladder by name, on a GPU or on an emulated one.

    import flash_tutorial as ft

    out = ft.attention(q, k, v, version="v03", causal=True)
    for version in ft.versions():
        print(version.name, "-", version.idea)

Importing this package is quick and does not import torch; `torch.ops.flash_tutorial.<version>` exists as soon as both
are imported, in either order.

The modules, by the question that they answer:

    what is there       versions      every version, as data
                        variants      v04:pad=0, a version with one constant set otherwise
                        registry      from a name, or a reader's .cu, to its operator
                        diff          what a version changed from its parent
                        scratch       copies of a kernel with a line changed
    how does it run     build         nvcc for a GPU, g++ for the emulator
                        emulator      counts what a kernel does to memory, and sees its races
                        ops           the contract around the kernels, and their PyTorch operators
                        doctor        what this machine can do
    is it right         problem       one attention problem and its tensors
                        reference     float64, PyTorch's own kernels and other packages'
                        compare       versions and references side by side
    how fast is it      suites        grids of problems by name
                        clock         times of functions that take turns on a GPU
                        benchmark     who is timed on what, and what is kept of it
                        timetable     the tables of that
                        tune          which tile shape is the fastest, looked up at every launch
    why                 inspect       what nvcc made: registers, occupancy, instructions
                        nsight        runs Nsight Compute and reads what it says
                        profile       one version, in figures and what they say
                        hardware      the emulator's counters beside a GPU's
                        model         bounds and occupancy, by a chip's published rates
    what is known       results       keeps and finds measured figures
                        ablation      what each decision is worth, here and elsewhere
                        standing      how near each version comes to FlashAttention-2, here and elsewhere
                        charts        which stored figures a picture shows
    how is it shown     cli           the command line
                        notebook      what the notebooks say the same way
                        plots         draws numbers
                        text, files   tables and notes; whole files
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING

from flash_tutorial import versions
from flash_tutorial.versions import Version, find

if TYPE_CHECKING:
    from flash_tutorial import compare, emulator, reference
    from flash_tutorial.build import BuildError
    from flash_tutorial.emulator import KernelFinding
    from flash_tutorial.ops import attention
    from flash_tutorial.scratch import edit

__all__ = [
    "BuildError",
    "KernelFinding",
    "Version",
    "attention",
    "compare",
    "edit",
    "emulator",
    "reference",
    "version",
    "versions",
]

# These names are looked up when they are first used, because most of their modules import torch.
_LAZY = {
    "BuildError": "build",
    "KernelFinding": "emulator",
    "attention": "ops",
    "compare": None,
    "edit": "scratch",
    "emulator": None,
    "reference": None,
}


def version(name: str | int) -> Version:
    """The version called `name`: "v03_warp_local", "v03", 3 or "warp_local". Raises ValueError with near matches."""
    return find(name)


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_LAZY[name] or name}")
    value = getattr(module, name) if _LAZY[name] else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Registers the operators right after somebody imports torch."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)  # the search below must not come back here
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return spec
        exec_module = spec.loader.exec_module

        def exec_module_and_register(module):
            exec_module(module)
            importlib.import_module("flash_tutorial.ops")

        spec.loader.exec_module = exec_module_and_register
        return spec


if "torch" in sys.modules:
    importlib.import_module("flash_tutorial.ops")
else:
    sys.meta_path.insert(0, _AfterTorch())
