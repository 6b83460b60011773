"""What ptxas and nvdisasm say is read rightly, and what is missing is said. The texts here are shortened real ones."""

import dataclasses
import importlib.metadata
import json
import linecache
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import command
import pytest

from flash_tutorial import build, inspect, model, registry
from flash_tutorial.versions import VERSIONS

needs_nvcc = pytest.mark.skipif(build.nvcc() is None, reason="there is no nvcc")
needs_nvdisasm = pytest.mark.skipif(inspect.disassembler() is None, reason="there is no nvdisasm")

SYMBOL = "_ZN50_GLOBAL__N__b70b7ae9_17_v03_warp_local_cu_d85b1ff016attention_kernelILi{}EEEvN5flash6ParamsE"
PTXAS = f"""\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{SYMBOL.format(128)}' for 'sm_80'
ptxas info    : Function properties for _Z4helpf
    8 bytes stack frame, 99 bytes spill stores, 99 bytes spill loads
ptxas info    : Function properties for {SYMBOL.format(128)}
    1200 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 256 bytes smem, 360 bytes cmem[0]
ptxas info    : Compile time = 47.666 ms
ptxas info    : Compiling entry function '{SYMBOL.format(64)}' for 'sm_80'
ptxas info    : Function properties for {SYMBOL.format(64)}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers
ptxas info    : Compile time = 68.901 ms
"""
SASS = f"""\
\t.target\tsm_90

//--------------------- .text.{SYMBOL.format(64)} --------------------------
\t.section\t.text.{SYMBOL.format(64)},"ax",@progbits
.text.{SYMBOL.format(64)}:
        .type           {SYMBOL.format(64)},@function
{SYMBOL.format(64)}:
\t//## File "{Path(__file__)}", line 1
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   HFMA2.MMA R2, -RZ, RZ, 0, 0 ;
\t//## File "{Path(__file__)}", line 3
        /*0020*/              @!P0 LDG.E.CONSTANT R8, desc[UR6][R8.64] ;
.L_x_5:
        /*0030*/                   FFMA R4, R5.reuse, R6, R4 ;
        /*0040*/                   UIADD3 UR4, UR11, 0x3f, URZ ;
        /*0050*/               @P1 BRA `(.L_x_5) ;
        /*0060*/                   EXIT ;
        /*0070*/                   NOP;

//--------------------- .text._Z1fPf --------------------------
.text._Z1fPf:
_Z1fPf:
        /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
"""


call = partial(command.call, "inspect")
refused = partial(command.refused, "inspect")


@pytest.fixture
def without_nvdisasm(monkeypatch):
    monkeypatch.setattr(inspect, "disassembler", lambda: None)


@pytest.fixture
def stored(monkeypatch):
    """inspect() with the texts above instead of tools, and a launch of attention_kernel<64>."""
    monkeypatch.setattr(build, "nvcc", lambda: "nvcc")
    monkeypatch.setattr(inspect, "_compile", lambda source, capability, cubin: PTXAS)
    monkeypatch.setattr(inspect, "disassembler", lambda: "nvdisasm")
    monkeypatch.setattr(inspect, "_disassemble", lambda cubin: SASS)
    monkeypatch.setattr(inspect, "_launches", lambda version, head_dim, dtype: {"attention_kernel<64>": (128, 32768)})
    if shutil.which("c++filt") is None:
        names = {SYMBOL.format(size): f"attention_kernel<{size}>" for size in (64, 128)}
        monkeypatch.setattr(inspect, "demangled", lambda symbols: {each: names[each] for each in symbols})


# ---------------------------------------------------------------------------------------------- parsing


def test_what_ptxas_says():
    first, second = inspect.parse_ptxas(PTXAS)
    assert (first.symbol, second.symbol) == (SYMBOL.format(64), SYMBOL.format(128))
    assert (first.registers, first.static_shared, first.stack, first.spill_stores, first.spill_loads) == (
        128,
        0,
        0,
        0,
        0,
    )
    figures = (second.registers, second.static_shared, second.stack, second.spill_stores, second.spill_loads)
    assert figures == (255, 256, 1200, 24, 40)


@pytest.mark.parametrize(
    ("signature", "name"),
    [
        ("void (anonymous namespace)::attention_kernel<64>(flash::Params)", "attention_kernel<64>"),
        ("(anonymous namespace)::scores_kernel(flash::Params)", "scores_kernel"),
        (
            "void mine::kernel<(Mode)1, std::pair<int, int> >(float*, int (*)(int))",
            "kernel<(Mode)1, std::pair<int, int> >",
        ),
        ("kernel", "kernel"),
    ],
)
def test_a_kernel_goes_by_its_name_and_template_arguments(signature, name):
    assert inspect._function_name(signature) == name


def test_what_nvdisasm_says():
    code = inspect.parse_sass(SASS)
    assert list(code) == [SYMBOL.format(64), "_Z1fPf"]
    instructions = code[SYMBOL.format(64)]
    assert [each.offset for each in instructions] == [0, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60]  # the NOP is left out
    assert [each.line for each in instructions] == [1, 1, 3, 3, 3, 3, 3]
    assert [each.label for each in instructions] == ["", "", "", ".L_x_5", "", "", ""]
    assert instructions[2].text == "@!P0 LDG.E.CONSTANT R8, desc[UR6][R8.64]"
    kinds = ["LDC", "MOV, S2R …", "LDG", "FFMA", "IADD3, LEA", "branches", "branches"]
    assert [each.kind for each in instructions] == kinds
    (last,) = code["_Z1fPf"]  # whose lines nothing tells
    assert (last.kind, last.file, last.line) == ("HMMA, HGMMA", "", 0)


INLINED = """\
.text._Z1f:
\t//## File "/k/include/ptx/mma.cuh", line 33 inlined at "/k/mine.cu", line 50
\t//## File "/k/mine.cu", line 50 inlined at "/k/mine.cu", line 159
\t//## File "/k/mine.cu", line 159
        /*0000*/                   HMMA.16816.F32.BF16 R104, R52, R84, RZ ;
        /*0010*/                   HMMA.16816.F32.BF16 R108, R52, R84, RZ ;
\t//## File "/k/include/only.cuh", line 7
        /*0020*/                   EXIT ;
"""


def test_inlined_code_is_put_down_to_the_kernels_own_line():
    (instructions,) = inspect.parse_sass(INLINED).values()
    places = [(Path(each.file).name, each.line) for each in instructions]
    assert places == [("mine.cu", 50), ("mine.cu", 50), ("only.cuh", 7)]


@needs_nvcc
@needs_nvdisasm
def test_tensor_core_instructions_have_lines_of_their_kernel():
    (kernel,) = inspect.inspect(registry.resolve("v05"), "sm_80").kernels
    lines = {
        (Path(each.file).name, "mma" in linecache.getline(each.file, each.line))
        for each in kernel.sass
        if each.opcode.startswith("HMMA")
    }
    assert lines == {("v05_tensor_core.cu", True)}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("HMMA.16816.F32.BF16 R4, R8, R2, R4", "HMMA, HGMMA"),
        ("LDSM.16.M88.4 R8, [R4]", "LDSM"),
        ("LDS.128 R8, [R4]", "LDS"),
        ("LDGSTS.E.BYPASS.128 [R3], desc[UR4][R4.64]", "LDGSTS, TMA"),
        ("UTMALDG.4D [UR8], [UR4]", "LDGSTS, TMA"),
        ("@P0 STL.64 [R1+0x8], R2", "LDL, STL"),
        ("HFMA2 R2, R3, R4, R5", "half precision"),
        ("HFMA2.MMA R2, -RZ, RZ, 0, 0", "MOV, S2R …"),
        ("F2FP.BF16.F32.PACK_AB R4, R5, R6", "F2FP, I2F …"),
        ("MUFU.EX2 R4, R5", "MUFU"),
        ("IMAD R4, R5, R6, RZ", "IMAD"),
        ("IMAD.WIDE.U32 R4, R5, R6, R8", "IMAD"),
        ("IMAD.MOV.U32 R4, RZ, RZ, R5", "MOV, S2R …"),
        ("IMAD.SHL.U32 R4, R5, 0x4, RZ", "SHF"),
        ("IMAD.IADD R4, R5, 0x1, R6", "IADD3, LEA"),
        ("UIADD3 UR4, UR11, 0x3f, URZ", "IADD3, LEA"),
        ("ULOP3.LUT UR4, UR5, 0x7, URZ, 0xc0, !UPT", "LOP3"),
        ("USHF.R.S32.HI UR4, URZ, 0x1f, UR5", "SHF"),
        ("SHFL.BFLY PT, R3, R2, 0x10, 0x1f", "SHFL"),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", "BAR"),
        ("DEPBAR.LE SB0, 0x0", "waits"),
        ("FANCY.NEW R0, R1", "other"),
    ],
)
def test_classes(text, kind):
    assert inspect.Instruction(0, text, "", 0).kind == kind


def test_no_opcode_has_two_classes():
    opcodes = [opcode for opcodes in inspect.CLASSES.values() for opcode in opcodes.split()]
    assert len(opcodes) == len(set(opcodes))


def test_what_never_does_anything_is_left_out():
    (code,) = inspect.parse_sass(
        ".text.f:\n"
        "        /*0000*/              @!PT LDS RZ, [RZ] ;\n"
        "        /*0010*/              LDGSTS.E.BYPASS.128 [R25], desc[UR10][R16.64], !P2 ;\n"
        "        /*0020*/              @!P0 LDS R4, [R5] ;\n"
    ).values()
    assert [each.opcode for each in code] == ["LDGSTS.E.BYPASS.128", "LDS"]


USAGE = f"""
Resource usage:
 Common:
  GLOBAL:0
 Function {SYMBOL.format(128)}:
  REG:96 STACK:16 SHARED:1280 LOCAL:0 CONSTANT[0]:608 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function {SYMBOL.format(64)}:
  REG:128 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:608 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_what_cuobjdump_says():
    first, second = inspect.parse_usage(USAGE, (9, 0))
    assert (first.symbol, first.registers, first.static_shared, first.stack) == (SYMBOL.format(64), 128, 0, 0)
    assert (second.symbol, second.registers, second.static_shared, second.stack) == (SYMBOL.format(128), 96, 256, 16)
    assert (first.spill_stores, first.spill_loads) == (None, None)
    assert inspect.parse_usage(USAGE, (8, 0))[1].static_shared == 1280


# ---------------------------------------------------------------------------------------------- occupancy


# What CUDA's own cuda_occupancy.h (toolkit 13.0) answers.
@pytest.mark.parametrize(
    ("chip", "threads", "registers", "shared", "blocks", "limiter"),
    [
        ("H200", 128, 168, 53248, 3, "registers"),
        ("H200", 128, 128, 32768, 4, "registers"),
        ("H200", 96, 177, 0, 2, "registers"),  # 11 warps' registers are there, but 2.75 in each quarter of the SM
        ("H200", 32, 64, 0, 32, "blocks per SM"),
        ("H200", 1024, 65, 0, 0, "registers"),  # 72 of them, as they are handed out: more than there are
        ("H200", 160, 196, 12897, 1, "registers"),
        ("A100", 96, 103, 0, 5, "registers"),
        ("A100", 256, 64, 31744, 4, "registers"),
        ("A100", 128, 255, 81920, 2, "shared memory"),
        ("RTX 4090", 128, 32, 0, 12, "threads"),
        ("RTX 4090", 32, 16, 0, 24, "blocks per SM"),
        ("RTX 3090", 128, 40, 100352, 1, "shared memory"),
        ("RTX 3090", 100, 40, 12161, 7, "shared memory"),  # 13,185 bytes with the block's own KiB, as 13,312
    ],
)
def test_occupancy_is_cudas(chip, threads, registers, shared, blocks, limiter):
    found = model.occupancy(model.CHIPS[chip], threads=threads, shared_bytes=shared, registers=registers)
    assert (found.blocks, found.limiter) == (blocks, limiter)
    assert found.warps == blocks * -(-threads // 32)


# ---------------------------------------------------------------------------------------------- showing


def test_the_launched_kernel_is_shown_with_its_occupancy(stored):
    found = inspect.inspect(registry.resolve("v03"))
    (kernel,) = found.kernels
    assert (found.arch, found.head_dim, found.notes) == ("sm_90", 64, ())
    assert (kernel.name, kernel.threads, kernel.dynamic_shared) == ("attention_kernel<64>", 128, 32768)
    assert kernel.occupancy == model.Occupancy(4, "registers", 16, 0.25)
    assert sum(kernel.histogram.values()) == len(kernel.sass) == 7


def test_the_architecture_decides_the_occupancy(stored):
    occupancy = inspect.inspect(registry.resolve("v03"), "sm_86").kernels[0].occupancy
    assert (occupancy.blocks, occupancy.limiter) == (3, "shared memory")


def test_json(stored):
    (entry,) = json.loads(call("v03", "--format", "json").stdout)
    assert list(entry) == ["version", "arch", "head_dim", "dtype", "kernels", "notes"]
    (kernel,) = entry["kernels"]
    assert (kernel["registers"], kernel["instructions"], kernel["histogram"]["FFMA"]) == (128, 7, 1)
    assert kernel["occupancy"]["limiter"] == "registers" and "sass" not in kernel
    (entry,) = json.loads(call("v03", "--sass", "--format", "json").stdout)
    assert entry["kernels"][0]["sass"][3]["label"] == ".L_x_5"


def test_two_have_a_column_of_differences(stored, monkeypatch):
    launches = {"v03_warp_local": (128, 32768), "v04_vectorized": (256, 1024)}
    monkeypatch.setattr(inspect, "_launches", lambda version, *_: {"attention_kernel<64>": launches[version.name]})
    rows = [row.split("|")[1:-1] for row in call("v03", "v04", "--format", "github").stdout.splitlines() if "|" in row]
    table = {name.strip(): [cell.strip() for cell in cells] for name, *cells in rows}
    assert table[""] == ["v03_warp_local attention_kernel<64>", "v04_vectorized attention_kernel<64>", "difference"]
    assert table["dynamic shared, bytes"] == ["32,768", "1,024", "−31,744"]
    assert table["threads a block"] == ["128", "256", "+128"]
    assert table["FFMA"] == ["1", "1", ""]
    assert "MUFU" not in table  # neither has any


def test_kernels_that_do_not_pair_have_no_differences(stored, monkeypatch):
    both = {f"attention_kernel<{size}>": (128, 0) for size in (64, 128)}
    monkeypatch.setattr(
        inspect, "_launches", lambda version, *_: both if version.number else {"attention_kernel<64>": (128, 0)}
    )
    output = call("v00", "v03").stdout
    assert "attention_kernel<128>" in output and "difference" not in output


def test_the_listing_stands_under_its_source_lines(stored):
    output = call("v03", "--sass").stdout
    first = Path(__file__).read_text().splitlines()[0]
    assert f"test_inspect.py:1  {first}\n    0000  LDC R1, c[0x0][0x28]\n    0010  HFMA2.MMA" in output
    assert ".L_x_5:\n    0030  FFMA R4, R5.reuse, R6, R4\n" in output


def test_without_a_launch_the_rest_is_shown_and_said(stored, monkeypatch):
    def fail(*_):
        raise build.BuildError("no C++ compiler\nat all")

    monkeypatch.setattr(inspect, "_launches", fail)
    found = inspect.inspect(registry.resolve("v03"))
    assert [kernel.occupancy for kernel in found.kernels] == [None, None]  # nothing tells which is launched
    assert found.notes[0].endswith("no launch in the emulator: no C++ compiler")
    output = inspect.describe([found])
    assert found.notes[0] in output and "–" in output


# ---------------------------------------------------------------------------------------------- what is missing


def test_without_a_disassembler_the_rest_is_shown_and_what_to_install(without_nvdisasm, monkeypatch):
    monkeypatch.setattr(build, "nvcc", lambda: "nvcc")
    monkeypatch.setattr(inspect, "_compile", lambda source, capability, cubin: PTXAS)
    monkeypatch.setattr(inspect, "_launches", lambda version, head_dim, dtype: {})
    result = call("v03")
    assert result.exit_code == 0
    assert "pip install nvidia-cuda-nvdisasm" in result.stdout and "128" in result.stdout
    assert "pip install nvidia-cuda-nvdisasm" in refused("v03", "--sass")


def test_without_nvcc_and_without_a_library(monkeypatch):
    monkeypatch.setattr(build, "nvcc", lambda: None)
    monkeypatch.setattr(build, "find_library", lambda *_: None)
    message = refused("v03")
    assert "no nvcc to compile v03_warp_local" in message and "no library of v03_warp_local" in message
    assert "pip install nvidia-cuda-nvcc nvidia-cuda-runtime" in message


def test_without_nvcc_and_without_cuobjdump(monkeypatch):
    monkeypatch.setattr(inspect, "_program", lambda name: None)
    monkeypatch.setattr(build, "nvcc", lambda: None)
    monkeypatch.setattr(build, "find_library", lambda *_: Path("v03.so"))
    message = refused("v03")
    assert "no cuobjdump" in message and "no library" not in message


def test_without_nvcc_a_built_library_is_looked_into(stored, monkeypatch):
    monkeypatch.setattr(build, "nvcc", lambda: None)
    monkeypatch.setattr(inspect, "_extracted", lambda version, capability, cubin: USAGE)
    found = inspect.inspect(registry.resolve("v03"))
    (kernel,) = found.kernels
    assert (kernel.registers, kernel.occupancy.limiter, kernel.histogram["FFMA"]) == (128, "registers", 1)
    assert "Spills are not known" in found.notes[0]
    (entry,) = json.loads(call("v03", "--format", "json").stdout)
    assert entry["kernels"][0]["spill_loads"] is None


def test_machine_code_is_taken_out_of_the_library_or_made_anew(stored, monkeypatch):
    def fail(error):
        tried.append("library")
        raise error

    tried, version = [], registry.resolve("v03")
    monkeypatch.setattr(inspect, "_compile", lambda *_: tried.append("nvcc"))
    monkeypatch.setattr(inspect, "_extracted", lambda *_: tried.append("library"))
    code = inspect.machine_code(version, "sm_90")
    assert code == list(inspect.parse_sass(SASS).values()) and tried == ["library"]
    for error in (ValueError("no library"), build.BuildError("cuobjdump fails")):
        monkeypatch.setattr(inspect, "_extracted", lambda *_, error=error: fail(error))
        tried.clear()
        assert inspect.machine_code(version, "sm_90") == code and tried == ["library", "nvcc"]
    monkeypatch.setattr(build, "nvcc", lambda: None)
    with pytest.raises(build.BuildError, match="cuobjdump fails"):
        inspect.machine_code(version, "sm_90")


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """A folder of programs that packages of PyPI brought, one named after each file in it."""

    def distribution(name):
        program = tmp_path / name.rpartition("-")[2]
        if not program.exists():
            raise importlib.metadata.PackageNotFoundError(name)
        profile = SimpleNamespace(name=f"{program.name}.profile", locate=lambda: tmp_path)
        return SimpleNamespace(files=[profile, SimpleNamespace(name=program.name, locate=lambda: program)])

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(build.shutil, "which", lambda *_, **__: None)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("nvdisasm", inspect.disassembler),
        ("cuobjdump", lambda: inspect._program("cuobjdump")),
        ("nvcc", build.nvcc),
    ],
)
def test_programs_of_pypi_packages_are_found(packages, program, found):
    assert found() is None
    (packages / program).touch(mode=0o755)
    assert found() == str(packages / program)


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["v99"], "unknown version 'v99'"),
        (["v03", "v99"], "unknown version 'v99'"),
        (["./none_v03.cu"], "there is no kernel file"),
        (["v03", "--arch", "sm_70"], "unknown architecture 'sm_70': accepted are sm_80, sm_86, sm_89, sm_90, sm_90a"),
        (["v03", "--head-dim", "0"], "head_dim is 0: v03_warp_local accepts 1 to 128"),
        (["v03", "--head-dim", "129"], "head_dim is 129"),
        (["v03", "--dtype", "float16"], "dtype is 'float16': v03_warp_local takes float32"),
        (["v03", "v99:pad=0"], "unknown version 'v99'"),
        ([], "Missing argument"),
    ],
)
def test_refusals(arguments, message):
    assert message in refused(*arguments)


# ---------------------------------------------------------------------------------------------- the tools themselves


@needs_nvcc
def test_a_real_compile(without_nvdisasm):
    (entry,) = json.loads(call("v03", "--head-dim", "20", "--arch", "sm_80", "--format", "json").stdout)
    (kernel,) = entry["kernels"]
    assert (entry["arch"], entry["head_dim"], kernel["name"]) == ("sm_80", 32, "attention_kernel<32>")
    assert 32 <= kernel["registers"] <= 255 and kernel["threads"] == 128 and kernel["dynamic_shared"] > 0
    assert kernel["occupancy"]["blocks"] >= 1 and kernel["histogram"] is None


@needs_nvcc
def test_of_several_instantiations_the_one_that_is_launched():
    (kernel,) = inspect.inspect(registry.resolve("v05"), dtype="bfloat16").kernels
    assert kernel.name == "attention_kernel<__nv_bfloat16, 64>" and kernel.occupancy is not None


@needs_nvcc
def test_a_variant_beside_its_version(without_nvdisasm):
    first, second = json.loads(call("v04", "v04:pad=0", "--format", "json").stdout)
    assert (first["version"], second["version"]) == ("v04_vectorized", "v04_vectorized:pad=0")
    # 4 floats less in each of the 64 rows of Q and the 64 of K and V
    assert first["kernels"][0]["dynamic_shared"] - second["kernels"][0]["dynamic_shared"] == 4 * 4 * 128


@needs_nvcc
@pytest.mark.skipif(inspect._program("cuobjdump") is None, reason="there is no cuobjdump")
def test_a_built_library_is_like_a_new_compile(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASH_TUTORIAL_CACHE", str(tmp_path))
    version = registry.resolve("v02")
    library = build.library(version, "cuda", ["9.0"], tmp_path)
    compiled = inspect.inspect(version)
    monkeypatch.setattr(build, "nvcc", lambda: None)
    monkeypatch.setattr(build, "find_library", lambda *_: library)
    (kernel,) = inspect.inspect(version).kernels
    known = dataclasses.replace(compiled.kernels[0], symbol=kernel.symbol, spill_stores=None, spill_loads=None)
    assert dataclasses.replace(kernel, sass=None) == dataclasses.replace(known, sass=None)
    assert kernel.histogram == known.histogram
    if kernel.sass:
        assert inspect.machine_code(version, "sm_90").count(kernel.sass) == 1
    assert "has no code for sm_80" in refused("v02", "--arch", "sm_80")


@needs_nvcc
@needs_nvdisasm
def test_a_real_disassembly():
    found = inspect.inspect(registry.resolve("v03"))
    (kernel,) = found.kernels
    assert kernel.histogram["FFMA"] > 100 and kernel.histogram["SHFL"] > 100 and found.notes == ()
    assert any(Path(each.file).name == "v03_warp_local.cu" for each in kernel.sass)


@needs_nvcc
def test_a_kernel_that_does_not_compile(tmp_path):
    (tmp_path / "my_v03.cu").write_text("int oops = ;\n")
    result = call(tmp_path / "my_v03.cu")
    assert result.exit_code == 1 and result.stdout == ""
    assert "does not compile (nvcc)" in result.stderr and "my_v03.cu(1)" in result.stderr


SHIPPED = [
    pytest.param(version, capability, id=f"{version.name}-{capability}")
    for version in VERSIONS
    for capability in build.version_archs(version, ("8.0", "9.0"))
]


@needs_nvcc
@pytest.mark.parametrize("version, capability", SHIPPED)
def test_no_instance_of_a_kernel_spills(version, capability, tmp_path):
    """Of every head size, dtype and tile shape; `inspect` shows those of one call."""
    kernels = inspect.parse_ptxas(inspect._compile(version.source, capability, tmp_path / "code.cubin"))
    assert kernels
    assert {each.name: each.spill_stores for each in kernels if each.spill_stores or each.spill_loads} == {}
