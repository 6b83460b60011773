"""What kernels are held against: PyTorch's own attentions by name, and the judgement."""

import math

import pytest
import torch

from flash_tutorial import reference
from flash_tutorial.reference import REFERENCES


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
        with reference._full_precision():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_float64_is_the_same_in_parts(monkeypatch):
    q, k, v = tensors(9, 11, heads=6, kv_heads=2)
    whole = reference.attention_float64(q, k, v, causal=True)
    monkeypatch.setattr(reference, "_CHUNK", 2 * 9 * 11)
    for part, all_at_once in zip(reference.attention_float64(q, k, v, causal=True), whole, strict=True):
        torch.testing.assert_close(part, all_at_once, atol=1e-14, rtol=0)


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
    assert check.limit == 2 * check.pytorch_error + 1e-6 == reference.limit(q, k, v, causal=True)
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
