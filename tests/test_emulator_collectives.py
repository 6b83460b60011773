"""What a warp does together, on the emulator, against NumPy: shuffles, votes, matrices, copies, atomics, barriers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from flash_tutorial import emulator

KERNELS = Path(__file__).parent / "emulator_kernels"
LANES = np.arange(32)
FULL = 0xFFFFFFFF
MASKS = [FULL, 0x0000FFFF, 0xFFFF0000, 0x55555555, 0x80000001, 0x00000010, 0xDEADBEEF]


@pytest.fixture(scope="module", params=[True, False], ids=["instrumented", "plain"])
def module(request):
    return emulator.compile(KERNELS / "collectives.cu", instrumented=request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def taking_part(mask: int) -> np.ndarray:
    return (mask >> LANES & 1).astype(bool)


# ---- shuffles


def shuffle_source(kind: int, operand: np.ndarray, width: int) -> np.ndarray:
    """The lane that each lane reads (PTX ISA, shfl.sync): its own where its segment of `width` lanes ends before."""
    start = LANES // width * width
    end = start + width - 1
    if kind == 0:
        return start + operand % width
    if kind == 1:
        return np.where(LANES - operand >= start, LANES - operand, LANES)
    target = LANES + operand if kind == 2 else LANES ^ operand
    return np.where(target <= end, target, LANES)


@pytest.mark.parametrize("width", [32, 16, 8, 4, 2, 1])
@pytest.mark.parametrize("kind", [0, 1, 2, 3], ids=["index", "up", "down", "xor"])
def test_shuffles(module, rng, kind, width):
    for mask in MASKS:
        for operand in [np.full(32, n) for n in (0, 1, 3, 16, 31)] + [rng.integers(0, 32, 32)] * (kind == 0):
            source, part = shuffle_source(kind, operand, width), taking_part(mask)
            defined = part & part[source]  # what a lane outside the mask would give is undefined
            value = rng.integers(-(2**31), 2**31, 32).astype(np.int32)
            out = np.full(32, -1, np.int32)
            arguments = (kind, mask, width, value, operand.astype(np.int32), out)
            report = module.launch("shuffle_int", 1, 32, *arguments, raise_on_finding=False)
            assert [finding.kind for finding in report.findings] == ["warp_mask"] * int((defined != part).any())
            np.testing.assert_array_equal(out[defined], value[source][defined])
            np.testing.assert_array_equal(out[~part], -1)


@pytest.mark.parametrize("name, dtype", [("float", np.float32), ("double", np.float64), ("long", np.uint64)])
def test_shuffles_of_other_types(module, rng, name, dtype):
    bits = rng.integers(0, 256, 32 * np.dtype(dtype).itemsize).astype(np.uint8)
    for kind in range(4):
        operand = rng.integers(0, 32, 32).astype(np.int32) if kind == 0 else np.full(32, 5, np.int32)
        out = np.zeros(32, dtype)
        module.launch(f"shuffle_{name}", 1, 32, kind, FULL, 32, bits.view(dtype), operand, out)
        source = shuffle_source(kind, operand, 32)
        np.testing.assert_array_equal(out.view(np.uint8), bits.reshape(32, -1)[source].reshape(-1))  # NaN's bits too


def test_the_branches_of_a_warp_shuffle_apart(module, rng):
    value, out = rng.integers(0, 1000, 32).astype(np.int32), np.zeros(32, np.int32)
    module.launch("divergent_shuffles", 1, 32, value, out)
    np.testing.assert_array_equal(out, value[np.where(LANES < 16, LANES ^ 1, LANES ^ 3)])


def test_half_warps_may_shuffle_unequally_often(module):
    expected = LANES.copy()
    for round in range(5):
        sums = expected + expected[LANES ^ (1 << round % 4)]
        expected = np.where((LANES >= 16) | (round == 0), sums, expected)
    out = np.zeros(32, np.int32)
    module.launch("uneven_rounds", 1, 32, out)
    np.testing.assert_array_equal(out, expected)


# ---- votes and reductions


@pytest.mark.parametrize("mask", MASKS, ids=hex)
def test_votes(module, rng, mask):
    part = taking_part(mask)
    for value in (rng.integers(0, 2, 32), np.zeros(32), np.ones(32), rng.integers(0, 4, 32), 0 * LANES - 1):
        value = value.astype(np.int32)
        outs = [np.full(32, -7, np.int32) for _ in range(2)] + [np.full(32, 7, np.uint32) for _ in range(2)]
        module.launch("votes", 1, 32, mask, value, *outs)
        said = value[part] != 0
        bits = 1 << LANES[part].astype(np.uint64)
        matches = [int(bits[value[part] == x].sum()) for x in value[part]]
        every, some, ballot, match = (out[part] for out in outs)
        assert ((every != 0) == said.all()).all() and ((some != 0) == said.any()).all()
        assert (ballot == int(bits[said].sum())).all()
        assert match.tolist() == matches
        assert all((out[~part] == initial).all() for out, initial in zip(outs, (-7, -7, 7, 7), strict=True))


@pytest.mark.parametrize("mask", MASKS, ids=hex)
def test_reductions(module, rng, mask):
    part = taking_part(mask)
    value = rng.integers(-(2**31), 2**31, 32).astype(np.int32)
    signed, unsigned = np.zeros((3, 32), np.int32), np.zeros((6, 32), np.uint32)
    module.launch("reductions", 1, 32, mask, value, signed, unsigned)
    mine, bits = value[part], value[part].view(np.uint32)
    total = int(mine.astype(np.int64).sum()) & FULL
    expected_signed = [np.uint32(total).astype(np.int32), mine.min(), mine.max()]
    expected_unsigned = [
        total,
        bits.min(),
        bits.max(),
        *(f.reduce(bits) for f in (np.bitwise_and, np.bitwise_or, np.bitwise_xor)),
    ]
    for got, expected in zip((*signed, *unsigned), (*expected_signed, *expected_unsigned), strict=True):
        assert (got[part] == expected).all()


def test_the_active_mask_holds_the_lane_that_asks(module):
    out = np.zeros(32, np.uint32)
    module.launch("active_mask", 1, 32, 0x0F0F1234, out)
    np.testing.assert_array_equal(out >> LANES & 1, taking_part(0x0F0F1234))


# ---- matrices


def fragments(matrices: np.ndarray, transposed: bool) -> np.ndarray:
    """What lane i of ldmatrix holds of each (8, 8) matrix: elements 2(i % 4) and the next of row i // 4, in a word."""
    rows = matrices.swapaxes(-1, -2) if transposed else matrices
    return np.ascontiguousarray(rows).view(np.uint32).reshape(len(matrices), 32)


@pytest.mark.parametrize("transposed", [False, True], ids=["", "trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(module, rng, count, transposed):
    matrices = rng.integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    out = np.zeros((count, 32), np.uint32)
    module.launch(f"ldmatrix_{count}{'_trans' * transposed}", 1, 32, matrices, out, shared_bytes=512)
    np.testing.assert_array_equal(out, fragments(matrices[:count], transposed))


@pytest.mark.parametrize("transposed", [False, True], ids=["", "trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(module, rng, count, transposed):
    matrices = rng.integers(0, 2**16, (count, 8, 8)).astype(np.uint16)
    out = np.zeros((count, 8, 8), np.uint16)
    held = fragments(matrices, transposed)
    module.launch(f"stmatrix_{count}{'_trans' * transposed}", 1, 32, held, out, shared_bytes=512)
    np.testing.assert_array_equal(out, matrices)


def as_bits(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(x.astype(np.float32)).to(dtype).view(torch.int16).numpy().view(np.uint16)


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(x.astype(np.float32)).to(dtype).double().numpy()


@pytest.mark.parametrize("name, dtype", [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_mma(module, rng, name, dtype):
    """d (16, 8) = a (16, 16) b (16, 8) + c: exact for small whole numbers, and to fp32's rounding for others."""
    for exact in (True, False):
        draw = (lambda *shape: rng.integers(-8, 9, shape)) if exact else (lambda *shape: rng.standard_normal(shape))
        a, b, c = draw(16, 16), draw(16, 8), draw(16, 8).astype(np.float32)
        d = np.zeros((16, 8), np.float32)
        module.launch(f"mma_{name}", 1, 32, as_bits(a, dtype), as_bits(b, dtype), c, d)
        expected = rounded(a, dtype) @ rounded(b, dtype) + c
        np.testing.assert_allclose(d, expected, rtol=0, atol=0 if exact else 1e-5)


def test_mma_lets_nan_and_infinity_through(module):
    a, b, c = np.zeros((16, 16)), np.eye(16, 8), np.zeros((16, 8), np.float32)
    a[3, 2], a[5, 1], c[7, 7] = np.nan, np.inf, -np.inf
    d = np.zeros((16, 8), np.float32)
    module.launch("mma_f16", 1, 32, as_bits(a, torch.float16), as_bits(b, torch.float16), c, d)
    expected = np.einsum("ik,kj->ij", a, np.where(b == 0, 0, b)) + c
    np.testing.assert_array_equal(d, expected.astype(np.float32))


# ---- asynchronous copies


@pytest.mark.parametrize("size", [4, 8, 16])
def test_cp_async(module, rng, size):
    source = rng.integers(0, 256, (32, size)).astype(np.uint8)
    out = np.zeros_like(source)
    module.launch(f"cp_async_{size}", 1, 32, source, out, shared_bytes=32 * size)
    np.testing.assert_array_equal(out, source)


def test_cp_async_fills_with_zeros(module, rng):
    source = rng.integers(1, 256, (32, 16)).astype(np.uint8)
    sizes = (LANES % 17).astype(np.int32)
    out = np.zeros_like(source)
    module.launch("cp_async_zero_fill", 1, 32, source, sizes, out, shared_bytes=512)
    np.testing.assert_array_equal(out, np.where(np.arange(16) < sizes[:, None], source, 0))


def test_cp_async_reads_nothing_beyond_its_source_bytes(module):
    """Half of the source exists: the other lanes copy 0 bytes from beyond its end."""
    source = np.ones((16, 16), np.uint8)
    out = np.zeros((32, 16), np.uint8)
    module.launch(
        "cp_async_zero_fill", 1, 32, source, np.where(LANES < 16, 16, 0).astype(np.int32), out, shared_bytes=512
    )
    assert (out[:16] == 1).all() and (out[16:] == 0).all()


def test_cp_async_lands_when_it_is_waited_for_and_not_before(module, rng):
    """Four groups are in flight; after wait_group<n> all but the n youngest are there, and the others still NaN."""
    source = rng.standard_normal((4, 32, 4)).astype(np.float32)
    out = np.zeros((4, 4, 32, 4), np.float32)
    module.launch("cp_async_stages", 1, 32, source, out, shared_bytes=2048, raise_on_finding=False)
    for pending in range(4):
        landed = 4 - pending
        np.testing.assert_array_equal(out[pending, :landed], source[:landed])
        assert np.isnan(out[pending, landed:]).all()


# ---- atomics

ATOMICS = {
    "add": lambda x: x.sum(),
    "min": lambda x: x.min(),
    "max": lambda x: x.max(),
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("name, dtype", [("int", np.int32), ("unsigned", np.uint32)])
def test_atomics(module, rng, name, dtype, space):
    """Every thread of 8 blocks applies each operation to a word of its own sort."""
    value = rng.integers(0, 2**32, 8 * 64).astype(np.uint32).view(dtype)
    start = np.array([0, np.iinfo(dtype).max, np.iinfo(dtype).min, -1 if dtype == np.int32 else FULL, 0, 0], dtype)
    out = start.copy()
    module.launch(f"atomics_{space}_{name}", 8, 64, value, start, out, shared_bytes=64)
    with np.errstate(over="ignore"):
        expected = [f(value.astype(dtype)).astype(dtype) for f in ATOMICS.values()]
    np.testing.assert_array_equal(out, expected)


def test_atomic_float_add_and_what_atomics_return(module):
    total, tickets = np.zeros(1, np.float32), np.zeros(512, np.int32)
    counter = np.zeros(1, np.int32)
    module.launch("atomic_tickets", 8, 64, total, counter, tickets)
    assert total[0] == sum(range(64)) * 8
    assert sorted(tickets.tolist()) == list(range(512)) and counter[0] == 512


def test_compare_and_swap_makes_a_lock_and_exchange_releases_it(module):
    lock, count = np.zeros(1, np.int32), np.zeros(1, np.int32)
    module.launch("lock", 8, 32, lock, count)
    assert (lock[0], count[0]) == (0, 8)


# ---- barriers


def test_named_barriers_let_a_producer_run_ahead(module):
    """Warp 0 fills a buffer and arrives; warp 1 waits, reads, and arrives at the barrier that says it is free again."""
    out = np.zeros((10, 32), np.float32)
    module.launch("producer_and_consumer", 1, 64, out, shared_bytes=128)
    np.testing.assert_array_equal(out, 100 * np.arange(10)[:, None] + LANES)


# ---- what they count


def test_collectives_are_counted_once_a_warp():
    module = emulator.compile(KERNELS / "collectives.cu")
    zeros, words = np.zeros(32, np.int32), np.zeros((4, 32), np.uint32)
    with emulator.instrument() as report:
        module.launch("shuffle_int", 1, 32, 0, FULL, 32, zeros, zeros, zeros.copy())
        module.launch("shuffle_double", 1, 32, 0, FULL, 32, np.zeros(32), zeros, np.zeros(32))
        module.launch("votes", 1, 32, FULL, zeros, zeros.copy(), zeros.copy(), words[0], words[1])
        module.launch("ldmatrix_4", 1, 32, np.zeros((4, 8, 8), np.uint16), words, shared_bytes=512)
        module.launch("stmatrix_2", 1, 32, words[:2], np.zeros((2, 8, 8), np.uint16), shared_bytes=512)
        module.launch("mma_bf16", 1, 32, *(np.zeros(n, np.uint16) for n in (256, 128)), *np.zeros((2, 128), np.float32))
        module.launch(
            "cp_async_16", 1, 32, np.zeros((32, 16), np.uint8), np.zeros((32, 16), np.uint8), shared_bytes=512
        )
        module.launch("atomic_tickets", 2, 64, np.zeros(1, np.float32), zeros[:1], np.zeros(128, np.int32))
        module.launch("producer_and_consumer", 1, 64, np.zeros((10, 32), np.float32), shared_bytes=128)
    totals = report.totals
    assert totals.shuffles == 1 + 2  # 8 bytes take two
    assert totals.votes == 4
    assert (totals.ldmatrix, totals.stmatrix, totals.mma, totals.cp_async) == (1, 1, 1, 1)
    assert totals.atomics == 2 * 2 * 2
    assert totals.barriers == 10 * 4  # two named barriers a round, each for two warps
    copy = report.line("flash::ptx::cp_async").counters
    assert (copy.cp_async, copy.global_load_requests, copy.global_load_sectors, copy.cp_async_wavefronts) == (
        1,
        1,
        16,
        4,
    )
    assert copy.shared_store_requests == 0
