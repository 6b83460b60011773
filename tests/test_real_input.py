"""Every version on a real model's attention layers: 12 heads, 127 tokens, head_dim 32, logits up to ±42."""

from pathlib import Path

import attention_cases as cases
import pytest
import torch
from safetensors import safe_open

import flash_tutorial as ft

FILE = Path(__file__).parent / "data" / "minilm_qkv.safetensors"
LAYERS = range(6)


def layer(number: int, device: str = "cpu") -> list[torch.Tensor]:
    with safe_open(FILE, "pt", device=device) as file:
        return [file.get_tensor(f"layer{number}.{name}") for name in ("q", "k", "v", "out")]


def test_file_is_what_the_tests_say():
    largest = 0.0
    with safe_open(FILE, "pt") as file:
        assert sorted(file.keys()) == sorted(f"layer{n}.{name}" for n in LAYERS for name in ("q", "k", "v", "out"))
    for number in LAYERS:
        q, k, v, out = layer(number)
        assert q.shape == k.shape == v.shape == out.shape == (1, 12, 127, 32)
        largest = max(largest, (q @ k.mT / 32**0.5).abs().max().item())
    assert 41 < largest < 43


@pytest.mark.parametrize("number", LAYERS)
@pytest.mark.parametrize("version", ft.versions(), ids=lambda version: version.name)
def test_layer(version, number, device):
    for dtype in version.dtypes:
        q, k, v, stored = (tensor.to(getattr(torch, dtype)) for tensor in layer(number, device))
        with cases.instrumented(device):
            out, lse = ft.attention(q, k, v, version=version.name, return_lse=True)
        cases.judge(out, lse, q, k, v, causal=False, scale=None, label=f"{dtype} layer {number}")
        if dtype == "float32":  # the precision that the stored output was computed in
            torch.testing.assert_close(out, stored, rtol=0, atol=1e-5)
