"""Versions that read q, k and v where they are, whatever their strides: right, and without a copy unless one is needed.

Beside the versions of the ladder that are strided, a kernel as simple as can be: what is tested of it is the way there.
"""

from dataclasses import replace

import attention_cases as cases
import pytest
import torch

import flash_tutorial as ft
from flash_tutorial import registry

KERNEL = r"""
#include "flash/vector.cuh"

namespace {

// One thread for each query; rows are read 16 bytes at a time.
__global__ void attention_kernel(flash::Params params) {
    const int query = blockIdx.x * blockDim.x + threadIdx.x;
    if (query >= params.queries) return;
    const int batch = blockIdx.y / params.heads, head = blockIdx.y % params.heads;
    const int kv_head = head / (params.heads / params.kv_heads);
    auto row = [&](const void* tensor, flash::Strides strides, int head, int row) {
        return static_cast<const float*>(tensor) + batch * strides.batch + head * strides.head + row * strides.row;
    };
    auto score = [&](int key) {
        float sum = 0;
        for (int d = 0; d < params.head_dim; d += 4) {
            const float4 a = flash::load4(row(params.q, params.q_strides, head, query) + d);
            const float4 b = flash::load4(row(params.k, params.k_strides, kv_head, key) + d);
            sum += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
        }
        return sum * params.scale;
    };
    const int visible = params.causal ? min(query + params.keys - params.queries + 1, params.keys) : params.keys;
    float m = -INFINITY, l = 0, O[128] = {};
    for (int key = 0; key < visible; ++key) m = fmaxf(m, score(key));
    for (int key = 0; key < visible; ++key) {
        const float p = expf(score(key) - m);
        l += p;
        for (int d = 0; d < params.head_dim; d += 4) {
            const float4 x = flash::load4(row(params.v, params.v_strides, kv_head, key) + d);
            O[d] += p * x.x, O[d + 1] += p * x.y, O[d + 2] += p * x.z, O[d + 3] += p * x.w;
        }
    }
    const int64_t at = int64_t(blockIdx.y) * params.queries + query;
    for (int d = 0; d < params.head_dim; ++d)
        static_cast<float*>(params.out)[at * params.head_dim + d] = l > 0 ? O[d] / l : 0;
    params.lse[at] = l > 0 ? m + logf(l) : -INFINITY;
}

void launch(const flash::Params& params, void* stream) {
    flash::launch(attention_kernel, dim3((params.queries + 31) / 32, params.batch * params.heads), dim3(32), 0, stream,
                  params);
}

}  // namespace

FLASH_REGISTER_STRIDED(launch)
"""
NAMES = ["simple", *(version.name for version in ft.versions() if version.strided)]


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """The strided versions by name."""
    path = tmp_path_factory.mktemp("kernels") / "simple_v02.cu"
    path.write_text(KERNEL)
    simple = replace(ft.version("v02"), name="simple", own=path, strided=True)
    return {"simple": simple} | {version.name: version for version in ft.versions() if version.strided}


@pytest.fixture
def seen(monkeypatch):
    """The tensors that kernels were given: a list of (q, k, v)."""
    original, calls = registry.operator, []

    def operator(*which):
        def call(q, k, v, *more):
            calls.append((q, k, v))
            return raw(q, k, v, *more)

        raw = original(*which)
        return call

    monkeypatch.setattr(registry, "operator", operator)
    return calls


def inputs(version, head_dim=64, layout="contiguous", device="cpu", lengths=(70, 97), heads=(2, 4, 2)):
    case = cases.Case(lengths, heads, head_dim, True, None, layout, "normal", version.dtypes[-1])
    return case, [cases.place(tensor, layout, device) for tensor in cases.make_inputs(case)]


@pytest.mark.parametrize("head_dim", [8, 32, 40, 128])
@pytest.mark.parametrize("layout", cases.AXES["layout"])
@pytest.mark.parametrize("name", NAMES)
def test_every_layout_is_right(name, versions, layout, head_dim, device):
    case, _ = inputs(versions[name], head_dim, layout)
    cases.check(versions[name], case, device)


# Which of q, k and v, as test_contract has them, a kernel reads where they are.
IN_PLACE = {
    "contiguous": lambda x: x,
    "heads beside each other": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "parts of one tensor": lambda x: torch.cat([x, x, x], dim=-1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "every other row": lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2],
    "one head for all": lambda x: x[:, :1].expand_as(x),
    "one row for all": lambda x: x[:, :, :1].expand_as(x),
    "an odd batch stride of one batch": lambda x: x[:1].as_strided((1, *x.shape[1:]), (13, *x.stride()[1:])),
}
COPIED = {
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "rows that are apart by an odd number": lambda x: torch.nn.functional.pad(x, (0, 1))[..., :-1],
    "columns beside each other": lambda x: x.mT.contiguous().mT,
    "every other element": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "one element for a whole row": lambda x: x[..., :1].expand_as(x),
}


@pytest.mark.parametrize("layout", IN_PLACE)
@pytest.mark.parametrize("name", NAMES)
def test_no_copy_is_made_where_none_is_needed(name, versions, layout, seen, device):
    _, tensors = inputs(versions[name], device=device)
    given = [IN_PLACE[layout](tensor) for tensor in tensors]
    out, lse = ft.attention(*given, version=versions[name], return_lse=True)
    ((*taken,),) = seen
    for tensor, kernels in zip(given, taken, strict=True):
        assert (tensor.data_ptr(), tensor.stride()) == (kernels.data_ptr(), kernels.stride())
    assert out.is_contiguous() and lse.is_contiguous()
    cases.judge(out, lse, *given, False, None, layout)


@pytest.mark.parametrize("layout", COPIED)
@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_made_where_one_is_needed_of_that_tensor_only(name, versions, layout, seen, device):
    _, (q, k, v) = inputs(versions[name], device=device)
    odd = COPIED[layout](k)
    out, lse = ft.attention(q, odd, v, version=versions[name], return_lse=True)
    ((*taken,),) = seen
    assert taken[0].data_ptr() == q.data_ptr() and taken[2].data_ptr() == v.data_ptr()
    assert taken[1].data_ptr() not in (k.data_ptr(), odd.data_ptr()) and taken[1].is_contiguous()
    cases.judge(out, lse, q, odd, v, False, None, layout)


def test_others_get_contiguous_tensors(seen):
    for version in ft.versions():
        if not version.strided:
            _, tensors = inputs(version, lengths=(3, 5))
            ft.attention(*(IN_PLACE["heads beside each other"](tensor) for tensor in tensors), version=version.name)
            assert all(tensor.is_contiguous() for tensor in seen.pop())


@pytest.mark.parametrize("name", NAMES)
def test_a_stride_beyond_32_bits(name, versions, tmp_path, device):
    """The second batch and the second head are 2³¹ elements and more away. On a CPU they lie in a file that is empty
    but for them."""
    _, tensors = inputs(versions[name], lengths=(5, 70), heads=(2, 2, 2), device=device)
    far, size = 2**31 + 64, tensors[0].element_size()
    total = (far + 2**20) * size
    if device == "cuda":
        if torch.cuda.mem_get_info()[0] < 2 * total:
            pytest.skip("needs GPU memory")
        storage = torch.empty(total, dtype=torch.uint8, device=device).view(tensors[0].dtype)
    else:
        storage = torch.from_file(str(tmp_path / "far"), shared=True, size=total // size, dtype=tensors[0].dtype)
    for dim in (0, 1):
        given = []
        for place, tensor in enumerate(tensors):
            strides = list(tensor.stride())
            strides[dim], strides[1 - dim] = far, tensor[0, 0].numel()
            given.append(storage.as_strided(tensor.shape, strides, place * 2**17))
            given[-1].copy_(tensor)
        out = ft.attention(*given, version=versions[name], causal=True)
        assert torch.equal(out, ft.attention(*tensors, version=versions[name], causal=True))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("misaligned", "16-byte-aligned tensors are accepted"),
        ("rows that are apart by an odd number", "a multiple of 16 bytes apart"),
        ("columns beside each other", "rows of neighbouring elements"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_the_raw_operator_refuses_what_the_kernel_cannot_read(name, versions, layout, message):
    _, (q, k, v) = inputs(versions[name])
    with pytest.raises(RuntimeError, match=f"v: .*{message}"):
        registry.operator(versions[name], "emulated")(q, k, COPIED[layout](v), False, 1.0)


def test_the_raw_operator_of_others_refuses_strides():
    version = ft.version("v02")
    _, (q, k, v) = inputs(version)
    with pytest.raises(RuntimeError, match="k: contiguous tensors are accepted"):
        registry.operator(version, "emulated")(q, IN_PLACE["heads beside each other"](k), v, False, 1.0)
