"""How often a version goes to global memory: what makes v01 FlashAttention-1, by the emulator's counters."""

import re

import pytest
import torch

import flash_tutorial as ft

FUSED = [version.name for version in ft.versions() if version.number >= 1]
LATER = [version.name for version in ft.versions() if version.number >= 2]
BATCH, HEADS, KV_HEADS, QUERIES, HEAD_DIM = 2, 4, 2, 150, 64
FLOAT = 4  # bytes
O_BYTES = Q_BYTES = FLOAT * BATCH * HEADS * QUERIES * HEAD_DIM
ROW_BYTES = FLOAT * BATCH * HEADS * QUERIES  # one number for each query


def dtype(name) -> torch.dtype:
    return getattr(torch, ft.version(name).dtypes[0])


def run(name, keys):
    """The emulator's only launch for `keys` keys."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, HEADS, QUERIES, HEAD_DIM, generator=generator).to(dtype(name))
    k, v = torch.randn(2, BATCH, KV_HEADS, keys, HEAD_DIM, generator=generator).to(dtype(name))
    with ft.emulator.instrument() as report:
        ft.attention(q, k, v, version=name)
    (launch,) = report.launches
    return launch


def block_kv(name) -> int:
    return int(re.search(r"constexpr int BLOCK_KV = (\d+);", ft.version(name).source.read_text())[1])


@pytest.mark.parametrize("keys", [1, 100, 300])
def test_v01_has_one_block_for_each_batch_and_head(keys):
    assert run("v01", keys).grid == (BATCH * HEADS, 1, 1)


@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_v01_reads_q_and_o_and_writes_o_again_for_every_kv_tile(tiles):
    """One K/V tile more costs all of Q, O and the running maximum and sum again, read, and O and those two, written."""
    keys = block_kv("v01")
    fewer, more = (run("v01", count * keys).counters for count in (tiles, tiles + 1))
    kv_tile_bytes = FLOAT * BATCH * HEADS * 2 * keys * HEAD_DIM
    loaded = more.global_load_bytes - fewer.global_load_bytes
    stored = more.global_store_bytes - fewer.global_store_bytes
    assert loaded == Q_BYTES + O_BYTES + 2 * ROW_BYTES + kv_tile_bytes
    assert stored == O_BYTES + 2 * ROW_BYTES


@pytest.mark.parametrize("name", LATER)
def test_later_versions_write_o_once_and_read_q_once(name):
    """However many keys, the outputs are written once; 64 keys more cost reading them once for each Q tile."""
    few, many = run(name, 128), run(name, 192)
    element = dtype(name).itemsize
    q_bytes = o_bytes = O_BYTES * element // FLOAT
    assert few.grid[0] * few.grid[1] * few.grid[2] > BATCH * HEADS
    for launch in (few, many):
        assert launch.counters.global_store_bytes == o_bytes + ROW_BYTES
    blocks = few.grid[0] * few.grid[1] * few.grid[2]
    loaded = many.counters.global_load_bytes - few.counters.global_load_bytes
    assert loaded == element * blocks * 2 * 64 * HEAD_DIM
    assert few.counters.global_load_bytes == q_bytes + 2 * loaded


def test_v00_writes_the_scores():
    """S once, P twice: more bytes for every key, where the fused versions have none."""
    generator = torch.Generator().manual_seed(0)
    stored = []
    for keys in (100, 101):
        q = torch.randn(BATCH, HEADS, QUERIES, HEAD_DIM, generator=generator)
        k, v = torch.randn(2, BATCH, KV_HEADS, keys, HEAD_DIM, generator=generator)
        with ft.emulator.instrument() as report:
            ft.attention(q, k, v, version="v00")
        stored.append(report.totals.global_store_bytes)
    assert stored[1] - stored[0] == 3 * ROW_BYTES


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize(
    "name, turns",
    [
        ("v05", {32: 4, 64: 8, 128: 8}),
        ("v06", {32: 1, 64: 1, 128: 1}),
        ("v06:layout=padded", {32: 1, 64: 1, 128: 1}),
        ("v06:layout=row_major", {32: 4, 64: 8, 128: 8}),
    ],
)
def test_turns_of_ldmatrix(name, turns, head_dim):
    """How often shared memory is read for a matrix of 8 rows, 128 bytes: as many as rows start in one bank."""
    q, k, v = torch.randn(3, 1, 1, 100, head_dim, generator=torch.Generator().manual_seed(0)).half()
    with ft.emulator.instrument() as report:
        ft.attention(q, k, v, version=name)
    totals = report.totals
    assert totals.ldmatrix == totals.shared_load_requests > 0
    assert totals.shared_load_wavefronts == turns[head_dim] * 4 * totals.ldmatrix
    assert totals.shared_load_conflicts == (turns[head_dim] - 1) * 4 * totals.ldmatrix
    if "padded" not in name:  # there a copy of 8 chunks, two rows of D = 32, spreads over more than 128 bytes
        assert totals.cp_async_wavefronts == 4 * totals.cp_async


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_v10_stores_o_16_bytes_at_a_time_and_without_a_conflict(head_dim):
    queries = 256
    q, k, v = torch.randn(3, 1, 1, queries, head_dim, generator=torch.Generator().manual_seed(0)).half()
    with ft.emulator.instrument() as report:
        ft.attention(q, k, v, version="v10", causal=True)
    totals = report.totals
    o_requests, lse_requests = queries * head_dim * 2 // (32 * 16), queries // 8
    assert totals.global_store_requests == o_requests + lse_requests
    assert totals.shared_load_requests == totals.ldmatrix + o_requests
    assert totals.shared_load_conflicts == totals.shared_store_conflicts == 0


def test_v10_multiplies_only_tiles_that_a_warp_sees():
    """A block of 128 queries has two tiles of 64 keys; two of its four warps, of 32 queries, see the first one only."""
    q, k, v = torch.randn(3, 1, 1, 128, 128, generator=torch.Generator().manual_seed(0)).half()
    with ft.emulator.instrument() as report:
        ft.attention(q, k, v, version="v10:tiles=128x128", causal=True)
    tile = 2 * (32 * 64 * 128) // (16 * 8 * 16)  # the two products of a warp
    assert report.totals.mma == (1 + 1 + 2 + 2) * tile
