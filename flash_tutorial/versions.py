"""The ladder as data: every version, in order, and how a reader may name it.

This is the single source for setup.py, the registry, the tests, the notebooks and `kernels/README.md`. A new version is
one `.cu` beside the others and one entry here. Nothing in this file imports torch.
"""

from __future__ import annotations

import difflib
import functools
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent

#: The directory of the kernel files: beside the package in a checkout, inside it after a plain `pip install .`
KERNELS = next((d for d in (_PACKAGE.parent / "kernels", _PACKAGE / "kernels") if d.is_dir()), _PACKAGE / "kernels")


@dataclass(frozen=True)
class Option:
    """A constant at the top of a kernel that its variants set otherwise: `v04:pad=0`. See variants.py."""

    name: str
    constant: str  # as the kernel calls it
    values: tuple[tuple[str, str], ...]  # the word a reader says, and the kernel's text for it; the kernel's own first
    meaning: str  # what it decides, in a few words

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(word for word, _ in self.values)


def _of(enumeration: str, *words: str) -> tuple[tuple[str, str], ...]:
    """Values of an enumeration of the kernel's."""
    return tuple((word, f"{enumeration}::{word}") for word in words)


def _numbers(*values: int) -> tuple[tuple[str, str], ...]:
    """Values that a reader and the kernel write alike."""
    return tuple((str(value), str(value)) for value in values)


def _numbered(automatic: str, *words: str) -> tuple[tuple[str, str], ...]:
    """Values that the kernel numbers from 0, after one for its own choice, -1."""
    return tuple((word, str(number)) for number, word in enumerate((automatic, *words), start=-1))


@dataclass(frozen=True)
class Version:
    """One rung of the ladder, a variant of one, or a reader's own kernel that resembles one."""

    number: int
    name: str  # the stem of its kernel, its notebook and its operator: "v03_warp_local"
    title: str
    idea: str  # one sentence
    parent: str | None  # the version whose kernel this one changes
    dtypes: tuple[str, ...] = ("float32",)
    head_dims: tuple[int, ...] = (32, 64, 128)  # compiled sizes; every smaller head size is padded up to one
    min_arch: str = "8.0"  # the oldest compute capability it runs on
    archs: tuple[str, ...] | None = None  # what nvcc builds it for, e.g. ("9.0a",); None: the build's default list
    fused: bool = True  # one kernel launch does it all
    strided: bool = False  # it reads q, k and v where they are, whatever their strides (if multiples of 16 bytes)
    options: tuple[Option, ...] = ()  # what its variants may set
    own: Path | None = None  # a reader's kernel file, or a variant's
    settings: tuple[tuple[str, str], ...] = ()  # of a variant: options and the words chosen

    @property
    def source(self) -> Path:
        """The kernel file."""
        return self.own or KERNELS / f"{self.name}.cu"

    @property
    def tiles(self) -> tuple[str, ...]:
        """The tile shapes between which a launch chooses, in the order of their numbers: the words of the option
        "tiles" after its first, which leaves the choice to the launch. None where a kernel has one shape, or a variant
        has made the choice."""
        if any(name == "tiles" for name, _ in self.settings):
            return ()
        return next((option.words[1:] for option in self.options if option.name == "tiles"), ())

    @property
    def label(self) -> str:
        """What tables call it: its full name; a reader's file by its file name, whose .cu keeps the two apart."""
        return self.own.name if self.own and not self.settings else self.name


_COPIES = Option("copies", "COPIES", _of("Copies", "async", "sync"), "how tiles are copied")
_REDUCE = Option("reduce", "REDUCE", _of("Reduce", "shuffle", "shared"), "how lanes find their row's maximum and sum")

VERSIONS: tuple[Version, ...] = (
    Version(
        number=0,
        name="v00_naive",
        title="Naive",
        idea="Three kernels, S = scale·QKᵀ, P = softmax(S) and O = PV, with S and P written out to global memory.",
        parent=None,
        fused=False,
    ),
    Version(
        number=1,
        name="v01_fa1",
        title="FlashAttention-1",
        idea="One fused kernel: an online softmax over tiles, one block per (batch, head), the loop over K/V tiles "
        "outside and O rewritten for each of them, so that S and P never leave the chip.",
        parent="v00_naive",
    ),
    Version(
        number=2,
        name="v02_fa2",
        title="FlashAttention-2",
        idea="One block per tile of queries with the loop over K/V tiles inside it: more blocks for the GPU, the "
        "softmax state stays on chip, and O is written once.",
        parent="v01_fa1",
    ),
    Version(
        number=3,
        name="v03_warp_local",
        title="Warp-local rows",
        idea="Each row belongs to one warp, its softmax state to that warp's registers: shuffles instead of block "
        "barriers, and K and V take turns in one buffer.",
        parent="v02_fa2",
    ),
    Version(
        number=4,
        name="v04_vectorized",
        title="Vectorized",
        idea="16-byte copies, padded K rows, 32-bit indices and register-blocked products: fewer instructions and "
        "no bank conflicts for the same arithmetic.",
        parent="v03_warp_local",
        options=(
            Option("copies", "COPY", (("vector", "4"), ("scalar", "1")), "floats that a thread copies at a time"),
            Option("pad", "PAD", _numbers(4, 0), "floats of padding after a row of Q, K and V in shared memory"),
            Option("index", "Index", (("32bit", "int"), ("64bit", "int64_t")), "type of an offset inside a tile"),
            Option("unroll", "UNROLL", (("2", "2"), ("all", "BLOCK_KV")), "steps of a product's loop written out"),
            Option(
                "inline",
                "INLINE",
                (("1", "__forceinline__"), ("0", "__attribute__((noinline))")),
                "inlining of helpers",
            ),
            Option("block_q", "BLOCK_Q", _numbers(64, 32), "queries of a tile"),
            Option("block_kv", "BLOCK_KV", _numbers(64, 32), "keys of a tile"),
        ),
    ),
    Version(
        number=5,
        name="v05_tensor_core",
        title="Tensor cores",
        idea="fp16 and bf16, and the two products on tensor cores: mma.sync on fragments that ldmatrix loads and "
        "cp.async has brought, S and P in registers only; row-major shared memory, conflicts and all.",
        parent="v04_vectorized",
        dtypes=("float16", "bfloat16"),
        options=(_COPIES, _REDUCE),
    ),
    Version(
        number=6,
        name="v06_swizzled",
        title="Swizzled",
        idea="The 16-byte chunks of a row change places by an XOR with the row's number, so that rows that ldmatrix "
        "reads together are in different banks: the same instructions, without a bank conflict.",
        parent="v05_tensor_core",
        dtypes=("float16", "bfloat16"),
        options=(
            Option("layout", "LAYOUT", _of("Layout", "swizzled", "padded", "row_major"), "layout of shared memory"),
            _COPIES,
            _REDUCE,
        ),
    ),
    Version(
        number=7,
        name="v07_double_buffered",
        title="Double-buffered",
        idea="Loads run ahead of the products: while one tile of K and of V is multiplied cp.async brings the next, "
        "and while one step's fragments are multiplied ldmatrix loads those of the next.",
        parent="v06_swizzled",
        dtypes=("float16", "bfloat16"),
        options=(
            Option("stages", "STAGES", _numbers(2, 1), "tiles of K, and of V, in shared memory"),
            Option("loads", "LOADS", _of("Loads", "eager", "lazy"), "when a copy of a tile begins"),
            Option(
                "fragments",
                "AHEAD",
                (("double", "1"), ("single", "0"), ("whole", "7")),
                "fragments that are loaded before a step is multiplied: the next one's too, its own only, or all",
            ),
        ),
    ),
    Version(
        number=8,
        name="v08_fused_softmax",
        title="Fused softmax",
        idea="exp(scale·s − m) as a power of 2 whose exponent is one multiply-add, row sums added up once at the end, "
        "and code of its own for the first tile: fewer instructions between the two products.",
        parent="v07_double_buffered",
        dtypes=("float16", "bfloat16"),
        options=(
            Option("exp", "EXP", _of("Exp", "exp2", "expf"), "the exponential that is called"),
            Option("sums", "SUMS", _of("Sums", "end", "tile"), "when the parts of a row's sum are added up"),
            Option("peel", "PEEL", (("1", "true"), ("0", "false")), "whether the first tile has code of its own"),
        ),
    ),
    Version(
        number=9,
        name="v09_adaptive_tiles",
        title="Adaptive tiles",
        idea="One kernel compiled for several tile shapes, of which a launch takes what suits its problem "
        "and GPU; in the largest a warp owns 32 rows and multiplies every fragment of K and V twice.",
        parent="v08_fused_softmax",
        dtypes=("float16", "bfloat16"),
        strided=True,
        options=(
            Option(
                "tiles",
                "TILES",
                _numbered("auto", "32x32", "64x32", "64x64", "64x64s1", "128x64w8", "128x64"),
                "queries x keys of a tile; s1: one stage, w8: 8 warps; auto: tuned, else by lengths and GPU",
            ),
        ),
    ),
    Version(
        number=10,
        name="v10_lean_instructions",
        title="Lean instructions",
        idea="What is the same for every tile is decided before the loop and what is rare has code of its own: tiles "
        "come backwards, the masked ones first, O is rescaled only when a maximum has grown by much, and O leaves "
        "through shared memory.",
        parent="v09_adaptive_tiles",
        dtypes=("float16", "bfloat16"),
        strided=True,
        options=(
            Option("order", "ORDER", _of("Order", "backward", "forward"), "order of the tiles of keys"),
            Option(
                "masks", "MASKS", _of("Masks", "apart", "asked"), "code of its own for masked tiles, or one for all"
            ),
            Option("skip", "SKIP", _of("Skip", "warp", "never"), "who skips a tile that none of its rows sees"),
            Option("rescale", "RESCALE", _of("Rescale", "lazy", "always"), "when O is rescaled"),
            Option("rows", "ROWS", _of("Rows", "fixed", "passed"), "strides of the rows of K and V"),
            Option(
                "addresses",
                "ENCODED",
                (("encoded", "true"), ("computed", "false")),
                "how the swizzled addresses of fragments are found",
            ),
            Option(
                "q",
                "Q_FRAGMENTS",
                _of("Fragments", "fitting", "kept", "loaded"),
                "fragments of Q: kept if they fit, always, or loaded 16 columns of head_dim at a time",
            ),
            Option(
                "k_copy",
                "K_COPY",
                _of("Copy", "fitting", "early", "late"),
                "when the copy of the next K begins: before the softmax if registers allow, always, or after it",
            ),
            Option("zeros", "ZEROS", _of("Zeros", "step", "tile"), "when accumulators of S become zero"),
            Option("cache", "CACHE", _of("Cache", "l2", "l1"), "caches that tiles of K and V stay in"),
            Option("epilogue", "EPILOGUE", _of("Epilogue", "shared", "half2", "scalar"), "how O is stored"),
            Option(
                "tiles",
                "TILES",
                _numbered("auto", "32x64", "64x64", "128x128"),
                "queries x keys of a tile, at head_dim 128 at most 64 keys; auto: tuned, else by lengths and GPU",
            ),
        ),
    ),
)


@functools.cache
def find(name: str | int) -> Version:
    """The version that `name` means: a number (3, "3", "v3", "v03"), a stem ("v03_warp_local") or a word of the stem
    or title ("warp_local", "flashattention-2").

    Raises ValueError with the near matches if nothing, or more than one thing, is meant.
    """
    wanted = "" if str(name).startswith("-") else _plain(str(name))  # -1 is nobody's number
    spellings: dict[str, set[Version]] = {}
    for version in VERSIONS:
        number, _, word = version.name.partition("_")
        for spelling in (version.name, number, word, version.title, str(version.number), f"v{version.number}"):
            spellings.setdefault(_plain(spelling), set()).add(version)
    if len(spellings.get(wanted, ())) == 1:
        return next(iter(spellings[wanted]))

    parts = {version for version in VERSIONS if len(wanted) > 1 and wanted in _plain(version.name)}
    if len(parts) == 1:
        return parts.pop()
    near = {v for close in difflib.get_close_matches(wanted, spellings, cutoff=0.6) for v in spellings[close]}
    candidates = [v.name for v in VERSIONS if v in (parts or near)]
    hint = f"did you mean {' or '.join(candidates)}?" if candidates else "nothing is close."
    raise ValueError(
        f"unknown version {str(name)!r}: {hint} The versions are {', '.join(v.name for v in VERSIONS)}; "
        "a path of a .cu file is accepted too"
    )


def _plain(text: str) -> str:
    """Lower case letters and digits only: how the words are joined does not matter."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


def accepting(dtype: str) -> tuple[Version, ...]:
    """The versions that take `dtype` ("float32", "float16", …), in ladder order."""
    return tuple(version for version in VERSIONS if dtype in version.dtypes)


def readme() -> str:
    """The text of kernels/README.md."""
    lines = [
        "# The kernels",
        "",
        "<!-- Generated from flash_tutorial/versions.py: `make docs` writes it anew. -->",
        "",
        "Each version is one file that reads from top to bottom and changes one thing of its parent "
        "(`flash-tutorial diff v03` shows what). `nvcc` compiles it for a GPU, `g++` compiles the same file for the "
        "emulator in [`emulator/`](emulator/README.md).",
        "",
        "| version | idea | changes | dtypes | head sizes | GPU |",
        "|---|---|---|---|---|---|",
    ]
    for v in VERSIONS:
        parent = f"[{v.parent}]({v.parent}.cu)" if v.parent else "–"
        head_dims = ", ".join(map(str, v.head_dims))
        lines.append(
            f"| [{v.name}]({v.name}.cu) | {v.idea} | {parent} | {', '.join(v.dtypes)} | {head_dims} | ≥ {v.min_arch} |"
        )
    lines += [
        "",
        "Head sizes between the compiled ones work by exact zero padding.",
        "",
        "| directory | holds |",
        "|---|---|",
        "| `include/flash/` | what the kernels share: the parameters, launches, one function per PTX instruction |",
        "| `emulator/` | the SIMT machine that runs the kernels on a CPU, counts and checks |",
        "| `binding.cpp` | the only file that sees PyTorch: makes an operator out of a kernel |",
    ]
    return "\n".join(lines) + "\n"


def write_readme() -> Path:
    """Writes kernels/README.md anew and returns its path."""
    path = KERNELS / "README.md"
    path.write_text(readme(), encoding="utf-8")
    return path


class _Callable(types.ModuleType):
    """`flash_tutorial.versions` is this module, and `flash_tutorial.versions()` the entries."""

    def __call__(self) -> tuple[Version, ...]:
        """Every version in ladder order."""
        return VERSIONS


sys.modules[__name__].__class__ = _Callable
