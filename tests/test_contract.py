"""What every version promises besides its numbers: refusals, the operator under torch's own checks and compilers, the
emulator's budget, and on a GPU streams, graphs and sizes beyond 32 bits."""

import re

import attention_cases as cases
import pytest
import torch

import flash_tutorial as ft

VERSIONS = {version.name: version for version in ft.versions()}
every_version = pytest.mark.parametrize("name", VERSIONS)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def tensors(name, batch=1, heads=4, kv_heads=2, queries=5, keys=7, head_dim=32, device="cpu", seed=0):
    """q, k, v of normal numbers in a dtype that version `name` takes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, queries, head_dim)] + 2 * [(batch, kv_heads, keys, head_dim)]
    dtype = getattr(torch, VERSIONS[name].dtypes[-1])
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def operator(name):
    return getattr(torch.ops.flash_tutorial, name)


def judge(name, out, lse, q, k, v, causal=False, scale=None):
    cases.judge(out, lse, q, k, v, causal, scale, name)


# ---------------------------------------------------------------------------------------------------- refusals


def each(change):
    """`change` made to q, k and v."""
    return lambda q, k, v: {"q": change(q), "k": change(k), "v": change(v)}


# What differs from a good call, the exception, and its message: the argument, what came, what is accepted.
REFUSALS = {
    "q of rank 3": (lambda q, k, v: {"q": q[0]}, ValueError, r"^q .*\(4, 5, 32\).*\(batch, heads, length, head_dim\)"),
    "k of rank 5": (lambda q, k, v: {"k": k[None]}, ValueError, r"^k .*\(1, 1, 2, 7, 32\).*\(batch, heads, length, "),
    "v of rank 1": (lambda q, k, v: {"v": v[0, 0, 0]}, ValueError, r"^v .*\(32,\).*\(batch, heads, length, head_dim\)"),
    "q no tensor": (lambda q, k, v: {"q": q.numpy()}, TypeError, "^q .*torch.Tensor.*ndarray"),
    "v no tensor": (lambda q, k, v: {"v": None}, TypeError, "^v .*torch.Tensor.*None"),
    "float64": (each(torch.Tensor.double), TypeError, "^q .*float64.*v03_warp_local accepts float32"),
    "integers": (each(torch.Tensor.int), TypeError, "^q .*int32.*v03_warp_local accepts float32"),
    "k of another dtype": (lambda q, k, v: {"k": k.double()}, TypeError, "^k .*float64.*q.*float32"),
    "v of another dtype": (lambda q, k, v: {"v": v.half()}, TypeError, "^v .*float16.*q.*float32"),
    "k on another device": (lambda q, k, v: {"k": k.to("meta")}, ValueError, "^k .*meta.*cpu"),
    "all on a strange device": (each(lambda x: x.to("meta")), ValueError, "^q .*meta.*cpu.*cuda"),
    "a sparse q": (lambda q, k, v: {"q": q.to_sparse()}, ValueError, "^q .*sparse.*strided"),
    "k of another batch": (lambda q, k, v: {"k": k[[0, 0, 0]]}, ValueError, "^k .*batch.*3.*q.*1"),
    "v of another length": (
        lambda q, k, v: {"v": v[:, :, :6]},
        ValueError,
        r"^v .*\(1, 2, 6, 32\).*k.*\(1, 2, 7, 32\)",
    ),
    "v of other heads": (lambda q, k, v: {"v": v[:, :1]}, ValueError, r"^v .*\(1, 1, 7, 32\).*k.*\(1, 2, 7, 32\)"),
    "v of another head size": (lambda q, k, v: {"v": v[..., :8]}, ValueError, r"^v .*\(1, 2, 7, 8\).*k.*7, 32\)"),
    "heads no multiple": (lambda q, k, v: {"q": q[:, :3]}, ValueError, "^q .*3 heads.*2.*multiple"),
    "no K/V heads": (lambda q, k, v: {"k": k[:, :0], "v": v[:, :0]}, ValueError, "^k .*0 heads.*q 4.*at least one"),
    "k of another head size": (lambda q, k, v: {"k": k[..., :8]}, ValueError, "^k .*head_dim 8.*q 32"),
    "head size 129": (each(lambda x: x.new_zeros(*x.shape[:3], 129)), ValueError, "head_dim 129.*1 to 128"),
    "head size 0": (each(lambda x: x[..., :0]), ValueError, "head_dim 0.*1 to 128"),
    "more keys than an int can count": (
        lambda q, k, v: dict.fromkeys("kv", k.new_zeros(1).expand(1, 2, 2**31 - 1025, 32)),
        ValueError,
        "^q has length 5 and k 2147482623: together 2147482624",
    ),
    "scale NaN": (lambda q, k, v: {"scale": float("nan")}, ValueError, "^scale .*nan.*finite"),
    "scale inf": (lambda q, k, v: {"scale": float("inf")}, ValueError, "^scale .*inf.*finite"),
    "scale beyond float32": (lambda q, k, v: {"scale": 1e39}, ValueError, r"^scale .*1e\+39.*finite"),
    "scale beyond every float": (lambda q, k, v: {"scale": 10**400}, ValueError, "^scale .*inf.*finite"),
    "scale a string": (lambda q, k, v: {"scale": "0.5"}, TypeError, "^scale .*float.*0.5"),
    "causal a string": (lambda q, k, v: {"causal": "yes"}, TypeError, "^causal .*bool.*yes"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refusal(refusal):
    change, exception, message = REFUSALS[refusal]
    q, k, v = tensors("v03_warp_local")
    with pytest.raises(exception, match=message) as caught:
        ft.attention(**{"q": q, "k": k, "v": v} | change(q, k, v), version="v03")
    assert caught.type is exception


# The dispatcher refuses what is no tensor, number or bool in its own words; on meta tensors an operator is its fake.
@pytest.mark.parametrize(
    "refusal", [name for name in REFUSALS if not re.search("no tensor|string|strange|every float", name)]
)
def test_operator_refuses_alike(refusal):
    change, exception, message = REFUSALS[refusal]
    q, k, v = tensors("v03_warp_local")
    with pytest.raises(exception, match=message) as caught:
        operator("v03_warp_local")(**{"q": q, "k": k, "v": v} | change(q, k, v))
    assert caught.type is exception


DTYPES = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("name, dtype", [(v.name, d) for v in ft.versions() for d in DTYPES if d not in v.dtypes])
def test_dtype_is_refused_by_name(name, dtype):
    version = VERSIONS[name]
    q, k, v = (tensor.to(getattr(torch, dtype)) for tensor in tensors(name))
    with pytest.raises(TypeError) as caught:
        ft.attention(q, k, v, version=name)
    accepting = [other.name for other in ft.versions() if dtype in other.dtypes]
    for word in (name, dtype, *version.dtypes, *accepting[:1]):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "version, words",
    [
        ("v77", ["v77", "v00_naive", "v04_vectorized"]),
        ("vectorised", ["vectorised", "v04_vectorized"]),
        ("", ["v00_naive"]),
        (77, ["77", "v00_naive"]),
    ],
)
def test_unknown_version_is_refused_with_what_exists(version, words):
    with pytest.raises(ValueError) as caught:
        ft.attention(*tensors("v03_warp_local"), version=version)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("spelling", ["v3", "v03", "3", 3, "v03_warp_local", "warp_local", "warp-local"])
def test_version_spellings(spelling):
    assert ft.version(spelling).name == "v03_warp_local"


def test_version_must_be_named():
    with pytest.raises(TypeError, match="version"):
        ft.attention(*tensors("v03_warp_local"))


@every_version
def test_backward_says_that_there_is_none(name):
    q, k, v = tensors(name)
    out, _ = operator(name)(q.requires_grad_(), k, v)
    with pytest.raises(NotImplementedError, match=f"(?s){name}.*backward|backward.*{name}"):
        out.sum().backward()


# ---------------------------------------------------------------------------------------------------- the operator


@every_version
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "scale": 0.5},
        {"queries": 0},
        {"keys": 0},
        {"head_dim": 20},
        {"permuted": True},
    ],
    ids=str,
)
def test_opcheck(name, options, device):
    options = dict(options)
    call = {key: options.pop(key) for key in ("causal", "scale") if key in options}
    permuted = options.pop("permuted", False)
    q, k, v = tensors(name, device=device, **options)
    if permuted:  # (batch, length, heads, head_dim) in memory, as models have it
        q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v))
    torch.library.opcheck(operator(name), (q, k, v), call)


@every_version
def test_operator_is_what_attention_calls(name, device):
    q, k, v = tensors(name, device=device)
    out, lse = operator(name)(q, k, v, True, 0.25)
    judge(name, out, lse, q, k, v, causal=True, scale=0.25)
    alone = ft.attention(q, k, v, version=name, causal=True, scale=0.25)
    pair = ft.attention(q, k, v, version=name, causal=True, scale=0.25, return_lse=True)
    assert torch.equal(alone, out) and torch.equal(pair[0], out) and torch.equal(pair[1], lse)


@every_version
def test_compiles_into_one_graph(name, device):
    """Shapes that change, too; aot_eager traces through the fake kernel without a C++ compiler's time."""

    def layer(q, k, v):
        out, lse = operator(name)(2 * q, k, v, True)
        return out + 1, lse

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for queries, keys in ((5, 7), (9, 4)):
        q, k, v = tensors(name, queries=queries, keys=keys, device=device)
        out, lse = compiled(q, k, v)
        judge(name, out - 1, lse, 2 * q, k, v, causal=True)


def test_compiles_with_inductor(device):
    q, k, v = tensors("v03_warp_local", device=device)
    torch.compiler.reset()
    compiled = torch.compile(lambda q, k, v: ft.attention(q + 1, k, v, version="v03", return_lse=True), fullgraph=True)
    judge("compiled", *compiled(q, k, v), q + 1, k, v)


@every_version
def test_inputs_that_require_grad_give_the_same(name, device):
    q, k, v = tensors(name, device=device)
    out, _ = operator(name)(q, k, v)
    with_grad, _ = operator(name)(*(tensor.clone().requires_grad_() for tensor in (q, k, v)))
    assert torch.equal(out, with_grad)
    with torch.no_grad():
        assert not operator(name)(q.clone().requires_grad_(), k, v)[0].requires_grad


@every_version
def test_more_than_65535_heads(name, device):
    q, k, v = tensors(name, batch=257, heads=256, kv_heads=128, queries=1, keys=2, head_dim=1, device=device)
    judge(name, *operator(name)(q, k, v), q, k, v)


@every_version
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_shared_memory_fits_a_consumer_gpu(name, head_dim):
    q, k, v = tensors(name, queries=70, keys=70, head_dim=head_dim)
    with ft.emulator.instrument(arch="sm_86") as report:
        ft.attention(q, k, v, version=name)
    assert report.launches
    assert max(launch.shared_bytes for launch in report.launches) <= 101_376


# ---------------------------------------------------------------------------------------------------- on a GPU


@needs_gpu
@every_version
def test_captures_into_a_cuda_graph(name):
    q, k, v = tensors(name, queries=65, keys=130, device="cuda")
    operator(name)(q, k, v)  # loads the library, which a capture must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = operator(name)(q, k, v)
    for tensor, fresh in zip((q, k, v), tensors(name, queries=65, keys=130, device="cuda", seed=1)):
        tensor.copy_(fresh)
    graph.replay()
    judge(name, out, lse, q, k, v)


@needs_gpu
@every_version
def test_runs_on_the_current_stream_and_does_not_wait(name):
    q, k, v = tensors(name, device="cuda")
    operator(name)(q, k, v)
    fresh = tensors(name, device="cuda", seed=1)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000_000)  # clock cycles: about half a second
            for tensor, values in zip((q, k, v), fresh):
                tensor.copy_(values)
            out, lse = operator(name)(q, k, v)
            assert not stream.query(), "the call waited for the GPU"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    judge(name, out, lse, *fresh)


@needs_gpu
@every_version
def test_runs_on_the_tensors_own_device(name):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q, k, v = tensors(name, device="cuda:1")
    assert torch.cuda.current_device() == 0
    out, lse = operator(name)(q, k, v)
    judge(name, out, lse, q, k, v)
    with pytest.raises(ValueError, match="cuda:0"):
        operator(name)(q, k.to("cuda:0"), v)


@needs_gpu
@every_version
@pytest.mark.parametrize("long", ["queries", "keys"])
def test_more_than_2_to_the_31_elements(name, long):
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    lengths = {"queries": 3, "keys": 3} | {long: 2**24 + 5}
    q, k, v = (
        torch.randn(1, 1, length, 128, device="cuda", dtype=getattr(torch, VERSIONS[name].dtypes[-1]))
        for length in (lengths["queries"], lengths["keys"], lengths["keys"])
    )
    if long == "keys":  # all the weight is on the last keys: an index that wraps around reads others
        q.abs_()
        k[:, :, :-70].abs_().mul_(-20)
    out, lse = operator(name)(q, k, v)
    shown = slice(-70, None)
    keys = slice(None) if long == "queries" else slice(-4096, None)
    judge(name, out[:, :, shown], lse[:, :, shown], q[:, :, shown], k[:, :, keys], v[:, :, keys])
