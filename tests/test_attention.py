"""Every version against float64 on every case, and the judge itself against answers known without it."""

import itertools

import attention_cases as cases
import pytest
import torch

import flash_tutorial as ft
from flash_tutorial import reference

VERSIONS = {version.name: version for version in ft.versions()}
SUITE = [(name, case) for name, version in VERSIONS.items() for case in cases.suite(version.dtypes)]


@pytest.mark.parametrize("name, case", SUITE, ids=lambda value: str(value))
def test_case(name, case, device):
    cases.check(name, case, device)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("head_dim", cases.AXES["head_dim"], ids="D{}".format)
@pytest.mark.parametrize("heads", cases.AXES["heads"], ids="B{0[0]}-H{0[1]}/{0[2]}".format)
@pytest.mark.parametrize("lengths", cases.AXES["lengths"], ids="M{0[0]}-N{0[1]}".format)
@pytest.mark.parametrize("name", VERSIONS)
def test_full_product(name, lengths, heads, head_dim, device):
    wrong = []
    for case in cases.product(VERSIONS[name].dtypes, lengths=[lengths], heads=[heads], head_dim=[head_dim]):
        try:
            cases.check(name, case, device)
        except (AssertionError, ft.KernelFinding) as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", VERSIONS)
def test_suite_covers_every_pair(name):
    suite = cases.suite(VERSIONS[name].dtypes)
    assert len(suite) <= 300
    axes = cases.AXES | {"dtype": VERSIONS[name].dtypes}
    for a, b in itertools.combinations(axes, 2):
        met = {(getattr(case, a), getattr(case, b)) for case in suite}
        assert met >= set(itertools.product(axes[a], axes[b]))
    telling = [case for case in suite if all(getattr(case, axis) in cases.TELLING[axis] for axis in cases.TELLING)]
    for a, b in itertools.combinations(axes | cases.TELLING, 2):
        met = {(getattr(case, a), getattr(case, b)) for case in telling}
        assert met >= set(itertools.product((axes | cases.TELLING)[a], (axes | cases.TELLING)[b]))


# ---------------------------------------------------------------------------------------------------- the judge


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries, keys", [(7, 7), (5, 9), (9, 5), (1, 1)])
def test_reference_is_pytorch_in_float64(queries, keys, causal):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, queries, 16, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, keys, 16, generator=generator, dtype=torch.float64)
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries) if causal else None
    out, lse = reference.attention_float64(q, k, v, causal=causal, scale=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    visible = mask.any(-1) if causal else torch.ones(queries, dtype=torch.bool)
    torch.testing.assert_close(out[:, :, visible], expected[:, :, visible], rtol=0, atol=1e-14)
    assert (out[:, :, ~visible] == 0).all() and (lse[:, :, ~visible] == -torch.inf).all()

    scores = 0.3 * q @ k.repeat_interleave(3, 1).mT
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-14)


INF, NAN = torch.inf, torch.nan


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize(
    "scores, scale, out, lse",
    [
        ([2.0], None, 10.0, 2.0),  # one key: its value
        ([3.0, -5.0], 0.0, 15.0, 0.6931472),  # scale 0: the mean, ln 2
        ([2.0**100, -(2.0**100)], None, 10.0, 2.0**100),
        ([2.0**100, -(2.0**100)], -1.0, 20.0, 2.0**100),
        ([-(2.0**100), -(2.0**100)], None, 15.0, -(2.0**100)),
        ([2.0**-120, 0.0], 2.0**127, 10.0, 128.0),
        ([2.0**120, 2.0**120], 2.0**-130, 15.0, 0.6941237),
        ([-INF, 1.0], None, 20.0, 1.0),
        ([1.0, -INF], None, 10.0, 1.0),
        ([-INF, -INF], None, 0.0, -INF),
        ([-INF, 1.0], 0.0, NAN, NAN),  # 0·−inf
        ([-INF, 1.0], -1.0, NAN, NAN),  # +inf
        ([INF, 1.0], None, NAN, NAN),
        ([NAN, 1.0], None, NAN, NAN),
        ([1.0, NAN], None, NAN, NAN),
        ([NAN, NAN], None, NAN, NAN),
        ([], None, 0.0, -INF),
    ],
)
def test_known_answers(name, scores, scale, out, lse, device):
    """One query, 1, and keys that are the scores themselves (head_dim 1); the values are 10, 20."""
    dtype = getattr(torch, VERSIONS[name].dtypes[-1])
    if dtype == torch.float16:
        scores = [max(-6e4, min(6e4, score)) if abs(score) < INF else score for score in scores]
    q = torch.ones(1, 1, 1, 1, dtype=dtype, device=device)
    k = torch.tensor(scores, dtype=dtype, device=device).view(1, 1, -1, 1)
    v = torch.tensor([10.0, 20.0][: len(scores)], dtype=dtype, device=device).view(1, 1, -1, 1)
    result, result_lse = ft.attention(q, k, v, version=name, scale=scale, return_lse=True)
    expected, expected_lse = torch.full_like(result, out), torch.full_like(result_lse, lse)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(result_lse, expected_lse, rtol=1e-6, atol=0, equal_nan=True)


def good_result():
    case = cases.Case((5, 9), (1, 2, 1), 8, True, None, "contiguous", "normal", "float32")
    q, k, v = cases.make_inputs(case)
    out, lse = reference.attention_float64(q, k, v, causal=True, scale=None)
    return [out.float(), lse.float(), q, k, v]


def test_judge_accepts_the_right_answer():
    cases.judge(*good_result(), causal=True, scale=None, label="")


@pytest.mark.parametrize(
    "spoil, complaint",
    [
        (lambda out, lse: out[0, 1, 2].add_(3e-5), "out is off by more than"),
        (lambda out, lse: lse[0, 1, 2].add_(3e-5), "lse is off by more than"),
        (lambda out, lse: out[0, 1, 2, 3].fill_(NAN), "out is off by more than"),
        (lambda out, lse: lse[0, 1, 2].fill_(-INF), "lse is off by more than"),
        (lambda out, lse: out.resize_(1, 2, 5, 7), "out is"),
        (lambda out, lse: lse.resize_(1, 2, 4), "lse is"),
    ],
)
def test_judge_refuses_a_wrong_one(spoil, complaint):
    out, lse, *inputs = good_result()
    spoil(out, lse)
    with pytest.raises(AssertionError, match=complaint):
        cases.judge(out, lse, *inputs, causal=True, scale=None, label="")


def test_judge_sees_tf32():
    """A product of inputs cut to TF32's 11 significant bits is not fp32's."""
    case = cases.Case((5, 9), (1, 2, 1), 32, False, None, "contiguous", "normal", "float32")
    q, k, v = cases.make_inputs(case)
    cut = [(tensor.view(torch.int32) & -(1 << 13)).view(torch.float32) for tensor in (q, k)]
    out, lse = reference.attention_float64(*cut, v)
    with pytest.raises(AssertionError, match="out is off by more than"):
        cases.judge(out.float(), lse.float(), q, k, v, causal=False, scale=None, label="")


def test_outputs_begin_as_nan(device):
    """What a kernel does not write is not by luck what the last call left there."""
    with cases.poisoned_allocations():
        assert torch.empty(3, device=device).isnan().all()
        assert torch.empty(3, dtype=torch.bfloat16, device=device).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("layout", cases.AXES["layout"])
def test_placed_tensors_stand_in_poison(layout, device):
    """The values are there; everything else in the storage, before, between and after them, is NaN."""
    tensor = torch.arange(1.0, 2 * 3 * 4 * 5 + 1).view(2, 3, 4, 5)
    shown = cases.place(tensor, layout, device)
    expected = tensor[:, :1].expand_as(tensor) if layout == "expanded" else tensor
    assert torch.equal(shown.cpu(), expected)
    numbers = cases.stored_bytes(shown).view(torch.float32)
    assert (~numbers.isnan()).sum() == expected.unique().numel()
    assert numbers[: cases.GUARD].isnan().all() and numbers[-cases.GUARD :].isnan().all()
    assert shown.is_contiguous() == (layout in ("contiguous", "misaligned"))
    assert (shown.data_ptr() % 16 == 0) == (layout != "misaligned")
