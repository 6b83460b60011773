"""What nvcc makes of a kernel: registers, shared memory, spills, occupancy, and its instructions by class.

Nothing here needs a GPU. ptxas, a part of nvcc, says what each kernel function takes; nvdisasm, where there is one,
what instructions it became; and a tiny launch on the emulator, how many threads and how much dynamic shared memory a
block has. Where there is no nvcc, a library that was built before is looked into, by cuobjdump. Counts of instructions
are static: one in a loop counts once, however often it runs.
"""

from __future__ import annotations

import dataclasses
import json
import linecache
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flash_tutorial import build, model
from flash_tutorial.versions import Version

CHIPS = {chip.arch: chip for chip in model.CHIPS.values()}
ARCHS = (*sorted(CHIPS), "sm_90a")

# class → opcodes; one with a dot before those without. A leading U, for a warp's uniform registers, is left out.
CLASSES = {
    "HMMA, HGMMA": "HMMA HGMMA QMMA QGMMA IMMA IGMMA BMMA BGMMA DMMA",
    "MUFU": "MUFU",
    "FFMA": "FFMA FFMA2",
    "FADD, FMUL, FMNMX …": "FADD FADD2 FMUL FMUL2 FMNMX FMNMX3 FSEL FSET FSETP FCHK",
    "half precision": "HFMA2 HADD2 HMUL2 HMNMX2 HSET2 HSETP2",
    "F2FP, I2F …": "F2F F2FP F2I F2IP FRND I2F I2FP I2I I2IP",
    "LDSM": "LDSM",
    "LDS": "LDS",
    "STS, STSM": "STS STSM",
    "LDGSTS, TMA": "LDGSTS BLKCP BLKRED TMALDG TMASTG TMAREDG TMAPF",
    "LDG": "LDG LD",
    "STG": "STG ST",
    "LDL, STL": "LDL STL",
    "LDC": "LDC LDCU",
    "SHFL": "SHFL",
    "BAR": "BAR",
    "waits": "DEPBAR LDGDEPBAR ARRIVES SYNCS WARPGROUP TMACMDFLUSH",
    "IMAD": "IMAD",
    "IADD3, LEA": "IADD3 IADD VIADD IMAD.IADD LEA IABS IMNMX IMNMX3 VIMNMX VIMNMX3 VIADDMNMX",
    "LOP3": "LOP3 PLOP3 LOP PRMT BMSK SGXT FLO POPC BREV",
    "SHF": "SHF SHL SHR IMAD.SHL",
    "ISETP, SEL": "ISETP SEL",
    "MOV, S2R …": "MOV IMAD.MOV CS2R S2R S2UR R2UR P2R R2P MOVM",
    "branches": "BRA BRX BSSY BSYNC BREAK BMOV CALL EXIT JMP JMX RET WARPSYNC YIELD NANOSLEEP",
}
OTHER = "other"
_CLASS_OF = {opcode: name for name, opcodes in CLASSES.items() for opcode in opcodes.split()}


@dataclass(frozen=True)
class Instruction:
    """One instruction of a kernel's machine code, and the line of source that it came from."""

    offset: int  # bytes from the function's start
    text: str  # "@P0 IADD3 R3, -R4, R3, RZ"
    file: str  # of the source line that it came from; "" where that is not known
    line: int
    label: str = ""  # that branches to it name

    @property
    def opcode(self) -> str:
        return re.sub(r"^@\S+\s+", "", self.text).partition(" ")[0]

    @property
    def kind(self) -> str:
        """Its class, a key of CLASSES or OTHER."""
        opcode, _, words = self.opcode.partition(".")
        if opcode == "HFMA2" and "-RZ, RZ," in self.text:  # how ptxas puts a constant into a register
            return _CLASS_OF["MOV"]
        names = (f"{opcode}.{words.partition('.')[0]}", opcode, opcode.removeprefix("U"))
        return next((_CLASS_OF[name] for name in names if name in _CLASS_OF), OTHER)

    @property
    def is_filling(self) -> bool:
        """Whether it never does anything: a NOP, or an LDS whose predicate is false, as ptxas puts before LDGSTS."""
        return self.opcode == "NOP" or self.text.startswith("@!PT ")


@dataclass(frozen=True)
class Kernel:
    """One `__global__` function. What is None is not known: see the Inspection's notes."""

    symbol: str
    name: str  # "attention_kernel<64>"
    registers: int  # of a thread
    static_shared: int  # bytes of a block
    stack: int  # bytes of a thread, as the spills
    spill_stores: int | None
    spill_loads: int | None
    threads: int | None = None  # of a block, as it is launched
    dynamic_shared: int | None = None
    occupancy: model.Occupancy | None = None
    sass: tuple[Instruction, ...] | None = None

    @property
    def histogram(self) -> dict[str, int] | None:
        """Instructions by class; those classes that it has none of are there too."""
        if self.sass is None:
            return None
        counted = Counter(each.kind for each in self.sass)
        return {name: counted[name] for name in (*CLASSES, OTHER)}


@dataclass(frozen=True)
class Inspection:
    """One version compiled for one architecture."""

    name: str
    arch: str
    head_dim: int  # the compiled one
    dtype: str
    kernels: tuple[Kernel, ...]
    notes: tuple[str, ...]  # what is not known, and why


# ---------------------------------------------------------------------------------------------- looking


def inspect(
    version: Version, arch: str | None = None, head_dim: int = 64, sass: bool = False, dtype: str | None = None
) -> Inspection:
    """Looks at what a version becomes for one architecture ("sm_90"): at the kernels that a head size and a dtype
    (None: the version's first) launch.

    Raises ValueError for what cannot be asked (with sass=True, the listing, also where there is no disassembler), and
    BuildError with nvcc's message for a kernel that does not compile.
    """
    if not 1 <= head_dim <= max(version.head_dims):
        raise ValueError(f"head_dim is {head_dim}: {version.label} accepts 1 to {max(version.head_dims)}")
    head_dim = min(size for size in version.head_dims if size >= head_dim)
    dtype = version.dtypes[0] if dtype is None else dtype
    if dtype not in version.dtypes:
        raise ValueError(f"dtype is {dtype!r}: {version.label} takes {', '.join(version.dtypes)}")
    capability = _capability(version, arch)
    arch = "sm_" + capability.replace(".", "")
    if disassembler() is None and sass:
        raise ValueError(f"--sass needs nvdisasm, and there is none: {_MEND}")

    notes = []
    with tempfile.TemporaryDirectory() as temporary:
        cubin = Path(temporary) / "kernel.cubin"
        if build.nvcc() is not None:
            kernels = parse_ptxas(_compile(version.source.resolve(), capability, cubin))
        else:
            kernels = parse_usage(_extracted(version, capability, cubin), build.capability(capability))
            notes.append(
                "Spills are not known: there is no nvcc, whose ptxas tells them. LDL and STL are their traces."
            )
        code = {}
        try:
            code = parse_sass(_disassemble(cubin))
        except build.BuildError as error:
            notes.append(f"Instructions are not known: {error}")
    try:
        launches = _launches(version, head_dim, dtype)
    except (RuntimeError, ImportError) as error:
        launches = {}
        reason = str(error).partition("\n")[0]
        notes.append(f"Threads, dynamic shared memory and occupancy are not known: no launch in the emulator: {reason}")
    launched = [kernel for kernel in kernels if kernel.name in launches]
    if launches and not launched:
        notes.append(
            f"Threads, dynamic shared memory and occupancy are not known: the emulator launched {', '.join(launches)}, "
            "which nvcc calls otherwise; all kernels of the file are shown"
        )
    launched.sort(key=lambda kernel: list(launches).index(kernel.name))
    found = tuple(
        _completed(each, launches.get(each.name), arch, code.get(each.symbol)) for each in launched or kernels
    )
    return Inspection(version.label, arch, head_dim, dtype, found, tuple(notes))


def machine_code(version: Version, arch: str) -> list[tuple[Instruction, ...]]:
    """The instructions of each kernel of a version for one architecture ("sm_90"): those of its library, as they are
    launched, or, where they cannot be taken out of one, those that nvcc makes now, which takes seconds.

    Raises ValueError for what cannot be asked, and where there are neither; BuildError where there is no disassembler,
    or a program fails.
    """
    capability = _capability(version, arch)
    with tempfile.TemporaryDirectory() as temporary:
        cubin = Path(temporary) / "kernel.cubin"
        try:
            _extracted(version, capability, cubin)
        except (ValueError, build.BuildError):
            if build.nvcc() is None:
                raise
            _compile(version.source.resolve(), capability, cubin)
        return list(parse_sass(_disassemble(cubin)).values())


def _capability(version: Version, arch: str | None) -> str:
    """The compute capability, such as "9.0", that `arch` names: the version's own or else 9.0 if it is None."""
    own = tuple(each.removesuffix("+PTX") for each in version.archs or ())
    if arch is None:
        return own[0] if own else "9.0"
    if arch not in ARCHS:
        raise ValueError(f"unknown architecture {arch!r}: accepted are {', '.join(ARCHS)}")
    capability = re.sub(r"sm_(\d+)(\d)(a?)", r"\1.\2\3", arch)
    if own and capability not in own:
        raise ValueError(f"{version.name} is compiled for {' and '.join(own)} only, not for {arch}")
    if build.capability(capability) < build.capability(version.min_arch):
        raise ValueError(f"{version.name} needs compute capability {version.min_arch} or later, {arch} is {capability}")
    return capability


def _compile(source: Path, capability: str, cubin: Path) -> str:
    """What ptxas says while nvcc makes machine code with the flags of our libraries."""
    flags = (*build._NVCC, *build._gencode(capability), *build._INCLUDES)
    command = [*build._nvcc_command(), *flags, "-cubin", "-Xptxas=-v", str(source), "-o", str(cubin)]
    return _output(command, f"{source} does not compile (nvcc)")


def _extracted(version: Version, capability: str, cubin: Path) -> str:
    """What cuobjdump says of the machine code in the version's built library, which goes to `cubin`; ValueError where
    there is no cuobjdump, no library, or no code for this architecture in it."""
    arch = "sm_" + capability.replace(".", "")
    cuobjdump = _program("cuobjdump")
    library = build.find_library(version, "cuda", build.capability(capability))
    if cuobjdump is None or library is None:
        lacking = [] if cuobjdump else ["no cuobjdump to look into a built library"]
        lacking += [] if library else [f"no library of {version.label} that was built for {arch}"]
        raise ValueError(
            f"there is no nvcc to compile {version.label} (no GPU is needed), and {' and '.join(lacking)}: install "
            "NVIDIA's CUDA toolkit and put nvcc on the PATH, or set CUDA_HOME; or "
            "`pip install nvidia-cuda-nvcc nvidia-cuda-runtime`"
        )
    folder = cubin.parent
    _output([cuobjdump, "-xelf", f".{arch}.", str(library)], f"cuobjdump fails on {library}", folder)
    found = [path for path in folder.glob(f"*.{arch}.cubin") if path.stat().st_size]
    if not found:
        raise ValueError(f"{library} has no code for {arch}, and there is no nvcc to compile {version.label} for it")
    found[0].rename(cubin)
    return _output([cuobjdump, "-res-usage", str(cubin)], "cuobjdump fails")


def _disassemble(cubin: Path) -> str:
    if (found := disassembler()) is None:
        raise build.BuildError(f"there is no nvdisasm; {_MEND}")
    return _output([found, "-c", "-gi", str(cubin)], "nvdisasm fails")


def _output(command: list[str], failing: str, folder: Path | None = None) -> str:
    """What a program prints, errors too; BuildError with that if it fails."""
    env = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=env, cwd=folder
    )
    if done.returncode != 0:
        raise build.BuildError(f"{failing}:\n{done.stdout.strip()}")
    return done.stdout


_MEND = "NVIDIA's CUDA toolkit has it, and so has `pip install nvidia-cuda-nvdisasm` (6 MB)"


def disassembler() -> str | None:
    """nvdisasm, None where there is none."""
    return _program("nvdisasm")


def _program(name: str) -> str | None:
    """A program of the CUDA toolkit from beside nvcc, the PATH or its PyPI package; None where there is none."""
    beside = Path(build.nvcc() or "nvcc").resolve().parent
    return shutil.which(name, path=str(beside)) or shutil.which(name) or build.packaged(f"nvidia-cuda-{name}")


def _launches(version: Version, head_dim: int, dtype: str) -> dict[str, tuple[int, int]]:
    """Kernel → threads and bytes of dynamic shared memory of a block, in launch order, from tiny emulated calls."""
    import torch

    from flash_tutorial import emulator, registry

    operator = registry.operator(version, "emulated")
    q, k, v = torch.zeros(3, 1, 1, 16, head_dim, dtype=getattr(torch, dtype))
    with emulator.launching(raise_on_finding=False) as report:
        for tiles in range(len(version.tiles)) or (-1,):  # each tile shape is a kernel of its own
            operator(q, k, v, False, 1.0, tiles)
    return {
        launch.kernel: (launch.block[0] * launch.block[1] * launch.block[2], launch.shared_bytes)
        for launch in report.launches
    }


def _completed(
    kernel: Kernel, launch: tuple[int, int] | None, arch: str, sass: tuple[Instruction, ...] | None
) -> Kernel:
    if launch is None:
        return dataclasses.replace(kernel, sass=sass)
    threads, dynamic = launch
    chip = CHIPS[arch.rstrip("a")]
    shared = kernel.static_shared + dynamic
    occupancy = model.occupancy(chip, threads=threads, shared_bytes=shared, registers=kernel.registers)
    return dataclasses.replace(kernel, threads=threads, dynamic_shared=dynamic, occupancy=occupancy, sass=sass)


# ---------------------------------------------------------------------------------------------- parsing


def parse_ptxas(text: str) -> list[Kernel]:
    """The kernels that `ptxas -v` tells of, in the file's order, which is the reverse of its own."""
    kernels = []
    for part in reversed(re.split(r"Compiling entry function ", text)[1:]):
        symbol = re.match(r"'([^']+)'", part)[1]
        # A function that is called and not inlined has properties of its own, which are not the kernel's.
        frame = part.partition(f"Function properties for {symbol}\n")[2].partition("\n")[0]
        kernel = Kernel(
            symbol,
            name=symbol,
            registers=_number(r"Used (\d+) registers", part),
            static_shared=_number(r"(\d+) bytes smem", part),
            stack=_number(r"(\d+) bytes stack frame", frame),
            spill_stores=_number(r"(\d+) bytes spill stores", frame),
            spill_loads=_number(r"(\d+) bytes spill loads", frame),
        )
        kernels.append(kernel)
    return _named(kernels)


def parse_usage(text: str, capability: tuple[int, int]) -> list[Kernel]:
    """The same from `cuobjdump -res-usage`, which does not tell spills."""
    usage = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    own = 1024 if capability >= (9, 0) else 0  # what every block takes is counted from Hopper on
    return _named(
        [
            Kernel(symbol, symbol, int(registers), max(int(shared) - own, 0), int(stack), None, None)
            for symbol, registers, stack, shared in reversed(usage)
        ]
    )


def _named(kernels: list[Kernel]) -> list[Kernel]:
    names = demangled(kernel.symbol for kernel in kernels)
    return [dataclasses.replace(kernel, name=names[kernel.symbol]) for kernel in kernels]


def _number(pattern: str, text: str) -> int:
    """0 where ptxas does not mention it."""
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def demangled(symbols: Iterable[str]) -> dict[str, str]:
    """Symbol → the function's name with its template arguments; the symbol itself where there is no c++filt."""
    symbols = list(symbols)
    try:
        asked = "\n".join(symbols)
        text = subprocess.run(["c++filt"], input=asked, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return dict(zip(symbols, symbols, strict=True))
    return {symbol: _function_name(line) for symbol, line in zip(symbols, text.splitlines(), strict=True)}


def _function_name(signature: str) -> str:
    """ "attention_kernel<64>" from "void (anonymous namespace)::attention_kernel<64>(flash::Params)"."""
    signature = signature.replace("(anonymous namespace)::", "")
    depth = 0
    for index, character in enumerate(signature):  # up to the parameters' parenthesis, the first outside of <>
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth == 0:
            signature = signature[:index]
            break
    head, bracket, arguments = signature.partition("<")
    return head.split(" ")[-1].split("::")[-1] + bracket + arguments


_FUNCTION = re.compile(r"^\.text\.(\S+):$")
_PLACE = re.compile(r'^\s*//## File "([^"]*)", line (\d+)')
_LABEL = re.compile(r"^(\.L_x?_?\d+):$")
_CODE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+([^;]*?)\s*;")


def parse_sass(text: str) -> dict[str, tuple[Instruction, ...]]:
    """Symbol → instructions, from `nvdisasm -c -gi`, but for those that never do anything.

    An instruction that a function of a header became is put down to the line of the kernel's own file that called it.
    """
    functions: dict[str, list[Instruction]] = {}
    instructions: list[Instruction] = []
    label = ""
    places: list[tuple[str, int]] = []  # innermost first: where the next instructions are from
    complete = False  # places: an instruction has followed
    for row in text.splitlines():
        if found := _FUNCTION.match(row):
            instructions = functions.setdefault(found[1], [])
            places, label = [], ""
        elif found := _PLACE.match(row):
            places = [*([] if complete else places), (os.path.normpath(found[1]), int(found[2]))]
            complete = False
        elif found := _LABEL.match(row):
            label = found[1]
        elif found := _CODE.match(row):
            complete = True
            file, line = next((place for place in places if place[0].endswith(".cu")), (places or [("", 0)])[-1])
            instruction = Instruction(int(found[1], 16), found[2], file, line, label)
            if not instruction.is_filling:
                instructions.append(instruction)
                label = ""
    return {symbol: tuple(instructions) for symbol, instructions in functions.items()}


# ---------------------------------------------------------------------------------------------- showing


def _occupancy(field: str):
    return lambda kernel: getattr(kernel.occupancy, field, None)


_ROWS = {
    "registers a thread": lambda kernel: kernel.registers,
    "static shared, bytes": lambda kernel: kernel.static_shared,
    "dynamic shared, bytes": lambda kernel: kernel.dynamic_shared,
    "threads a block": lambda kernel: kernel.threads,
    "stack frame, bytes": lambda kernel: kernel.stack,
    "spill stores, bytes": lambda kernel: kernel.spill_stores,
    "spill loads, bytes": lambda kernel: kernel.spill_loads,
    "blocks an SM": _occupancy("blocks"),
    "warps an SM": _occupancy("warps"),
    "occupancy, %": lambda kernel: None if kernel.occupancy is None else round(100 * kernel.occupancy.share),
    "limited by": _occupancy("limiter"),
    "instructions": lambda kernel: None if kernel.sass is None else len(kernel.sass),
    **{
        name: lambda kernel, name=name: None if kernel.sass is None else kernel.histogram[name]
        for name in (*CLASSES, OTHER)
    },
}


def describe(inspections: Sequence[Inspection], fmt: str = "simple", sass: bool = False) -> str:
    """A table with a column for each kernel, then notes and, if wanted, the listings; fmt "json" for all as data.

    Two versions with one kernel each, or with kernels of the same names, have a column of differences too.
    """
    if fmt == "json":
        return json.dumps([_data(each, sass) for each in inspections], indent=2, ensure_ascii=False)
    from tabulate import tabulate

    columns = [(each.name, kernel) for each in inspections for kernel in each.kernels]
    break_at = "\n" if len(columns) > 2 else " "  # of a kernel's name: many columns have to be narrow
    headers = [f"{name}\n{kernel.name.replace(', ', ',' + break_at)}" for name, kernel in columns]
    if fmt != "simple":
        headers = [header.replace("\n", " ") for header in headers]
    pairs = _pairs(inspections)
    table = []
    for name, value in _ROWS.items():
        values = [value(kernel) for _, kernel in columns]
        if name in (*CLASSES, OTHER) and not any(values):
            continue
        differences = [_difference(value(first), value(second)) for first, second in pairs]
        table.append([name, *map(_shown, values), *differences])
    extra = ["difference" if len(pairs) == 1 else f"difference\n{first.name}" for first, _ in pairs]
    if fmt != "simple":
        extra = [each.replace("\n", " ") for each in extra]
    align = ["left", *["right"] * (len(columns) + len(pairs))]
    parts = [
        "; ".join(dict.fromkeys(f"{each.arch}, head size {each.head_dim}, {each.dtype}" for each in inspections)),
        tabulate(table, ["", *headers, *extra], tablefmt=fmt, colalign=align, disable_numparse=True),
        *dict.fromkeys(note for each in inspections for note in each.notes),
    ]
    if sass:
        parts += [listing(each, fmt) for each in inspections]
    return "\n\n".join(parts)


def _pairs(inspections: Sequence[Inspection]) -> list[tuple[Kernel, Kernel]]:
    if len(inspections) != 2:
        return []
    first, second = (each.kernels for each in inspections)
    same = [kernel.name for kernel in first] == [kernel.name for kernel in second]
    return list(zip(first, second, strict=True)) if same or len(first) == len(second) == 1 else []


def _shown(value: int | str | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else value


def _difference(first: int | str | None, second: int | str | None) -> str:
    if isinstance(first, int) and isinstance(second, int) and first != second:
        return f"{second - first:+,}".replace("-", "−")
    return ""


def listing(inspection: Inspection, fmt: str = "simple") -> str:
    """The machine code under the source lines that it came from."""
    parts = []
    for kernel in inspection.kernels:
        rows, place = [], None
        for each in kernel.sass or ():
            if each.label:
                rows.append(f"{each.label}:")
            if (each.file, each.line) != place:
                place = (each.file, each.line)
                text = linecache.getline(each.file, each.line).strip()
                rows.append(f"{Path(each.file).name}:{each.line}  {text}".rstrip() if each.file else "(no source line)")
            rows.append(f"    {each.offset:04x}  {each.text}")
        code = "\n".join(rows)
        heading = f"{inspection.name}: {kernel.name}, {inspection.arch}"
        parts.append(f"### {heading}\n\n```\n{code}\n```" if fmt == "github" else f"{heading}\n\n{code}")
    return "\n\n".join(parts)


def _data(inspection: Inspection, sass: bool) -> dict:
    kernels = []
    for kernel in inspection.kernels:
        fields = dataclasses.asdict(dataclasses.replace(kernel, sass=None))
        fields |= {"instructions": kernel.sass and len(kernel.sass), "histogram": kernel.histogram}
        if sass:
            fields["sass"] = [dataclasses.asdict(each) for each in kernel.sass or ()]
        else:
            del fields["sass"]
        kernels.append(fields)
    return {
        "version": inspection.name,
        "arch": inspection.arch,
        "head_dim": inspection.head_dim,
        "dtype": inspection.dtype,
        "kernels": kernels,
        "notes": list(inspection.notes),
    }
