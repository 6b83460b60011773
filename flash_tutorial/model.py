"""What a chip needs at least: occupancy, and lower bounds on a kernel's time from what the emulator counted.

The emulator counts what does not depend on the chip. This module puts those counts against a chip's published rates.
Its answers are bounds, not predictions of time: no kernel is faster than its largest bound, and how far above it a
kernel runs is what latency, the instructions around the work, and waiting cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

SECTOR_BYTES = 32
WARP = 32
QUARTERS = 4  # of an SM: each with registers and a warp scheduler of its own


@dataclass(frozen=True)
class Chip:
    """One GPU's published figures; per-SM limits are those of its compute capability in the CUDA programming guide.

    Rates of tensor cores are those for dense fp16 or bf16 operands and fp32 sums: from the data sheets of the H200
    (which prints twice that, for sparse operands) and the A100, and NVIDIA's white papers on GA102 and AD102.
    """

    name: str
    arch: str
    sms: int
    clock: float  # Hz, boost
    dram: float  # byte/s
    shared_per_sm: int  # bytes
    threads_per_sm: int
    blocks_per_sm: int
    half_flops: float  # FLOP/s of the tensor cores
    fp32_lanes: int = 128  # multiply-adds per SM and clock
    registers_per_sm: int = 65536
    l1_bytes: int = 128  # per SM and clock, from L1 to registers; also one shared-memory wavefront per clock
    exponentials: int = 16  # per SM and clock; each expf or exp2f is one

    @property
    def flops(self) -> float:
        """FP32 FLOP/s without tensor cores; a multiply-add is two."""
        return 2 * self.sms * self.fp32_lanes * self.clock


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("H200", "sm_90", 132, 1.98e9, 4.8e12, 228 * 1024, 2048, 32, 989.5e12),
        Chip("A100", "sm_80", 108, 1.41e9, 1.555e12, 164 * 1024, 2048, 32, 312e12, fp32_lanes=64),
        Chip("RTX 4090", "sm_89", 128, 2.52e9, 1.008e12, 100 * 1024, 1536, 24, 165.2e12),
        Chip("RTX 3090", "sm_86", 82, 1.695e9, 0.936e12, 100 * 1024, 1536, 16, 71e12),
    )
}


@dataclass(frozen=True)
class Occupancy:
    """How many blocks one SM holds at a time, which resource says so, and the warps that makes."""

    blocks: int
    limiter: str
    warps: int
    share: float  # of the warps the SM could hold


def occupancy(chip: Chip, *, threads: int, shared_bytes: int, registers: int | None = None) -> Occupancy:
    """Occupancy of a kernel with ``threads`` and ``shared_bytes`` per block and ``registers`` per thread.

    Without ``registers`` (no nvcc has compiled the kernel yet) they are taken not to limit. The rules are those of
    CUDA's cuda_occupancy.h: a block takes 1 KiB of shared memory more than it asked for, in units of 128 bytes, and
    registers are handed out to warps in units of 256, from the quarter of the SM that the warp runs on. A block for
    which an empty SM has no room gives 0 blocks: it cannot be launched.
    """
    warps = -(-threads // WARP)
    limits = {
        "blocks per SM": chip.blocks_per_sm,
        "threads": chip.threads_per_sm // (warps * WARP),
        "shared memory": chip.shared_per_sm // _rounded_up(shared_bytes + 1024, 128),
    }
    if registers is not None:
        per_warp = _rounded_up(registers * WARP, 256)
        warps_per_quarter = chip.registers_per_sm // QUARTERS // per_warp
        # A launch is checked as if each quarter got as many of the block's warps as the fullest.
        fits = _rounded_up(warps, QUARTERS) * per_warp <= chip.registers_per_sm
        limits["registers"] = QUARTERS * warps_per_quarter // warps if fits else 0
    limiter = min(limits, key=limits.__getitem__)
    blocks = limits[limiter]
    return Occupancy(blocks, limiter, blocks * warps, blocks * warps * WARP / chip.threads_per_sm)


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def attention_flops(batch: int, heads: int, queries: int, keys: int, head_dim: int, causal: bool = False) -> int:
    """Floating-point operations of one forward pass as the field counts them: two products, a causal one at half."""
    flops = 4 * batch * heads * queries * keys * head_dim
    return flops // 2 if causal else flops


def quadratic(samples: Sequence[tuple[int, int]], at: int) -> int:
    """The value at ``at`` of the quadratic through three (length, count) samples.

    A kernel's counters are quadratic in the sequence length as long as every length is a multiple of its tiles, so
    three short runs determine the count at any length exactly. Raises ValueError if the result is no whole number,
    which means that the samples do not come from a quadratic.
    """
    (x0, y0), (x1, y1), (x2, y2) = samples
    value = (
        Fraction(y0 * (at - x1) * (at - x2), (x0 - x1) * (x0 - x2))
        + Fraction(y1 * (at - x0) * (at - x2), (x1 - x0) * (x1 - x2))
        + Fraction(y2 * (at - x0) * (at - x1), (x2 - x0) * (x2 - x1))
    )
    if value.denominator != 1:
        raise ValueError(
            f"no quadratic with whole values passes through {list(samples)}: at {at} it gives {float(value)}"
        )
    return int(value)


def lower_bounds(
    chip: Chip,
    *,
    flops: int,
    shared_wavefronts: int,
    sectors: int,
    dram_bytes: int,
    blocks: int,
    half: bool = False,
    exponentials: int = 0,
) -> Mapping[str, float]:
    """Seconds that each of a chip's resources needs at least for what was counted over a whole launch.

    ``sectors`` are those between L1 and the threads, loads and stores; ``dram_bytes`` those that must come from or go
    to memory whatever the caches do. With fewer ``blocks`` than SMs the others idle, which the on-chip bounds
    include. With ``half`` the ``flops`` are those of tensor cores, which are so fast that the ``exponentials`` are a
    bound of their own.
    """
    busy = min(chip.sms, blocks)
    if half:
        arithmetic = {
            "tensor cores": flops / (chip.half_flops * busy / chip.sms),
            "exponentials": exponentials / (chip.exponentials * chip.clock * busy),
        }
    else:
        arithmetic = {"FP32 arithmetic": flops / (chip.flops * busy / chip.sms)}
    return {
        **arithmetic,
        "shared memory": shared_wavefronts / (chip.clock * busy),
        "L1 (global accesses)": sectors * SECTOR_BYTES / (chip.l1_bytes * chip.clock * busy),
        "DRAM": dram_bytes / chip.dram,
    }
