"""What kernels are held against: PyTorch's own attentions by name, and the judgement."""

import math
import sys
import types

import pytest
import torch

from flash_tutorial import reference
from flash_tutorial.reference import PEERS, REFERENCES


def tensors(queries, keys, heads=4, kv_heads=4, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, heads, queries, 64), (2, kv_heads, keys, 64), (2, kv_heads, keys, 64)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


# ------------------------------------------------------------------------------------------------------ by their names


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("queries, keys", [(33, 33), (17, 40), (40, 17)])
@pytest.mark.parametrize("name", REFERENCES)
def test_references_mean_the_same(name, queries, keys, heads, kv_heads, causal, device):
    """Causal is bottom-right, heads are grouped; what a backend cannot do it refuses."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k, v = tensors(queries, keys, heads, kv_heads, device, dtype)
    try:
        out = REFERENCES[name](q, k, v, causal, 0.2)
    except NotImplementedError as refusal:
        assert name not in ("baseline", "sdpa", "sdpa_math"), refusal
        assert str(dtype).removeprefix("torch.") in str(refusal)
        pytest.skip(str(refusal))
    exact, _ = reference.attention_float64(q, k, v, causal, 0.2)
    assert reference.error(out, exact).max() < (5e-3 if dtype == torch.float16 else 1e-5)


def test_baseline_knows_no_keys_and_the_others_refuse():
    q, k, v = tensors(5, 0)
    assert not REFERENCES["baseline"](q, k, v).any()
    with pytest.raises(NotImplementedError, match="no keys"):
        REFERENCES["sdpa"](q, k, v)


def test_precision_of_float32_products_is_full_and_restored():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with reference.full_precision():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("chunk", [2 * 9 * 11, 4 * 11, 5])  # two heads at a time, four queries, one query
@pytest.mark.parametrize("queries, keys", [(9, 11), (11, 9)])
@pytest.mark.parametrize("attention", [reference.attention_float64, reference.attention_same_precision])
def test_parts_make_the_whole(monkeypatch, attention, queries, keys, chunk):
    q, k, v = tensors(queries, keys, heads=6, kv_heads=2)
    whole = attention(q, k, v, causal=True)
    monkeypatch.setattr(reference, "_CHUNK", chunk)
    exact = whole[0].dtype == torch.float64
    for part, all_at_once in zip(attention(q, k, v, causal=True), whole, strict=True):
        assert part.dtype == all_at_once.dtype
        torch.testing.assert_close(part, all_at_once, atol=1e-14 if exact else 1e-6, rtol=0)


# ------------------------------------------------------------------------------------------------------ other packages


def packaged(monkeypatch, name, **content):
    """A package of this name, importable."""
    parent, _, _ = name.rpartition(".")
    if parent:
        packaged(monkeypatch, parent)
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


def pretended_flash_attn(q, k, v, softmax_scale=None, causal=False):
    """As the package has it: (batch, length, heads, head_dim), and any number of query heads for a K/V head."""
    out, lse = reference.attention_same_precision(*(x.transpose(1, 2) for x in (q, k, v)), causal, softmax_scale)
    return out.transpose(1, 2), lse


class BottomRight:
    """xFormers' name of the causal mask that means the same for any two lengths."""


def pretended_xformers(q, k, v, attn_bias=None, scale=None):
    assert attn_bias is None or isinstance(attn_bias, BottomRight)
    if q.dim() == 5:  # (batch, length, groups, heads of a group, head_dim)
        assert k.stride(3) == 0
        return pretended_xformers(*(x.flatten(2, 3) for x in (q, k, v)), attn_bias, scale).unflatten(2, q.shape[2:4])
    return pretended_flash_attn(q, k, v, scale, attn_bias is not None)[0]


@pytest.fixture
def every_peer(monkeypatch):
    for name in ("flash_attn", "flash_attn_3", "flash_attn_4"):
        packaged(monkeypatch, PEERS[name].module, flash_attn_func=pretended_flash_attn)
    bias = types.SimpleNamespace(attn_bias=types.SimpleNamespace(LowerTriangularFromBottomRightMask=BottomRight))
    packaged(monkeypatch, "xformers.ops", memory_efficient_attention=pretended_xformers, fmha=bias)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", PEERS)
def test_peers_mean_the_same(every_peer, name, kv_heads, causal):
    q, k, v = tensors(17, 40, 4, kv_heads, dtype=torch.float16)
    assert PEERS[name].installed
    out = PEERS[name](q, k, v, causal, 0.2)
    exact, _ = reference.attention_float64(q, k, v, causal, 0.2)
    assert reference.error(out, exact).max() < 5e-3


def test_a_peer_refuses_a_dtype_by_name(every_peer):
    q, k, v = tensors(5, 5)
    with pytest.raises(NotImplementedError, match="FlashAttention-2 takes float16 and bfloat16, not float32"):
        PEERS["flash_attn"](q, k, v)
    assert PEERS["xformers"](q, k, v).shape == q.shape


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_is_not_there_is_not_installed(monkeypatch, name):
    top = PEERS[name].module.partition(".")[0]
    monkeypatch.setitem(sys.modules, top, None)  # as if there were none
    assert not PEERS[name].installed
    with pytest.raises(ImportError, match=top):
        PEERS[name](*tensors(5, 5, dtype=torch.float16))


def test_a_package_without_the_part_that_is_wanted_is_not_installed(monkeypatch):
    packaged(monkeypatch, "flash_attn")  # its second generation without the fourth, or the other way round
    assert not PEERS["flash_attn"].installed and not PEERS["flash_attn_4"].installed


@pytest.mark.parametrize(
    "content, why",
    [
        ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("raise OSError('undefined symbol: _ZN2at')", "OSError: undefined symbol: _ZN2at"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_package_that_fails_to_import_is_installed_and_says_why(monkeypatch, tmp_path, content, why):
    (tmp_path / "flash_attn_interface.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    assert PEERS["flash_attn_3"].installed
    with pytest.raises(ImportError, match=why):
        PEERS["flash_attn_3"](*tensors(5, 5, dtype=torch.float16))


# ------------------------------------------------------------------------------------------------------------- judging


def test_error_of_nan_and_infinities():
    exact = torch.tensor([1.0, math.nan, math.inf, -math.inf, math.nan, 2.0, 1.0], dtype=torch.float64)
    result = torch.tensor([1.5, math.nan, math.inf, math.inf, 0.0, math.nan, -math.inf])
    assert reference.error(result, exact).tolist() == [0.5, 0, 0, math.inf, math.inf, math.inf, math.inf]


def test_relative_error_is_absolute_below_one():
    exact = torch.tensor([100.0, 0.5], dtype=torch.float64)
    assert reference.error(torch.tensor([101.0, 0.25]), exact, relative=True).tolist() == [0.01, 0.25]


def test_pytorch_itself_is_right():
    q, k, v = tensors(20, 30)
    check = reference.check(*reference.attention_same_precision(q, k, v, True), q, k, v, causal=True)
    assert check.ok and check.error == check.pytorch_error > 0
    assert check.limit == 2 * check.pytorch_error + 1e-6
    assert check.detail == ""


@pytest.mark.parametrize("value, shown", [(0.5, "off by"), (math.nan, "nan"), (math.inf, "inf")])
def test_one_wrong_element_is_found(value, shown):
    q, k, v = tensors(20, 30)
    out, _ = reference.attention_same_precision(q, k, v)
    out[1, 2, 3, 4] += value
    check = reference.check(out, None, q, k, v)
    assert not check.ok and "out[1, 2, 3, 4]" in check.detail and shown in check.detail


def test_a_wrong_lse_is_found():
    q, k, v = tensors(20, 30)
    out, lse = reference.attention_same_precision(q, k, v)
    lse[1, 3, 19] += 1e-3
    check = reference.check(out, lse, q, k, v)
    assert not check.ok and "lse[1, 3, 19]" in check.detail and check.error == check.pytorch_error


def test_a_result_of_another_shape_is_refused():
    q, k, v = tensors(20, 30)
    out, lse = reference.attention_same_precision(q, k, v)
    with pytest.raises(ValueError, match="out has shape"):
        reference.check(out[:, :, :1], lse, q, k, v)


def test_empty_results_are_right():
    for queries, keys in ((0, 5), (5, 0), (0, 0)):
        q, k, v = tensors(queries, keys)
        assert reference.check(*reference.attention_same_precision(q, k, v), q, k, v).ok
