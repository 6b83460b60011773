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

# What is changed in a good call, the exception, and what its message must hold: the argument, what came, what is accepted.
REFUSALS = {
    "q of rank 3": (lambda q, k, v: dict(q=q[0]), ValueError, "q", r"\(4, 5, 32\)", "4|four"),
    "k of rank 5": (lambda q, k, v: dict(k=k[None]), ValueError, "k", r"\(1, 1, 2, 7, 32\)", "4|four"),
    "v of rank 1": (lambda q, k, v: dict(v=v[0, 0, 0]), ValueError, "v", r"\(32,\)", "4|four"),
    "q no tensor": (lambda q, k, v: dict(q=q.numpy()), TypeError, "q", "ndarray", "[Tt]ensor"),
    "v no tensor": (lambda q, k, v: dict(v=None), TypeError, "v", "None", "[Tt]ensor"),
    "float64": (lambda q, k, v: dict(q=q.double(), k=k.double(), v=v.double()), TypeError, "q", "float64", "float32"),
    "integers": (lambda q, k, v: dict(q=q.int(), k=k.int(), v=v.int()), TypeError, "q", "int32", "float32"),
    "k of another dtype": (lambda q, k, v: dict(k=k.double()), TypeError, "k", "float64", "float32"),
    "v of another dtype": (lambda q, k, v: dict(v=v.half()), TypeError, "v", "float16", "float32"),
    "k on another device": (lambda q, k, v: dict(k=k.to("meta")), ValueError, "k", "meta", "cpu"),
    "all on a strange device": (
        lambda q, k, v: dict(q=q.to("meta"), k=k.to("meta"), v=v.to("meta")),
        ValueError,
        "q",
        "meta",
        "cpu",
        "cuda",
    ),
    "a sparse q": (lambda q, k, v: dict(q=q.to_sparse()), ValueError, "q", "sparse", "strided|dense"),
    "batches differ": (lambda q, k, v: dict(k=k.repeat(3, 1, 1, 1), v=v.repeat(3, 1, 1, 1)), ValueError, "k", "3", "1"),
    "k and v lengths differ": (lambda q, k, v: dict(v=v[:, :, :6]), ValueError, "v", "6", "7"),
    "k and v heads differ": (lambda q, k, v: dict(v=v[:, :1]), ValueError, "v", "1", "2"),
    "heads no multiple": (lambda q, k, v: dict(q=q[:, :3]), ValueError, "q", "3", "multiple", "2"),
    "no K/V heads": (lambda q, k, v: dict(k=k[:, :0], v=v[:, :0]), ValueError, "k", "0"),
    "head sizes of q and k differ": (lambda q, k, v: dict(q=q[..., :8]), ValueError, "q", "8", "32"),
    "head size of v differs": (lambda q, k, v: dict(v=v[..., :8]), ValueError, "v", "8", "32"),
    "head size 129": (lambda q, k, v: wide(129), ValueError, "head_dim|head size", "129", "128"),
    "head size 0": (lambda q, k, v: wide(0), ValueError, "head_dim|head size", "0", "128"),
    "scale NaN": (lambda q, k, v: dict(scale=float("nan")), ValueError, "scale", "nan", "finite"),
    "scale inf": (lambda q, k, v: dict(scale=float("inf")), ValueError, "scale", "inf", "finite"),
    "scale beyond float32": (lambda q, k, v: dict(scale=1e39), ValueError, "scale", r"1e\+39", "finite"),
    "scale a string": (lambda q, k, v: dict(scale="0.5"), TypeError, "scale", "0.5|str", "float|number"),
    "causal a string": (lambda q, k, v: dict(causal="yes"), TypeError, "causal", "yes|str", "bool"),
}


def wide(head_dim):
    """q, k, v of a head size that no version takes."""
    return dict(zip("qkv", (torch.zeros(1, 4, 5, head_dim), *torch.zeros(2, 1, 2, 7, head_dim))))


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refusal(refusal):
    change, exception, *words = REFUSALS[refusal]
    q, k, v = tensors("v03_warp_local")
    arguments = dict(q=q, k=k, v=v, causal=False, scale=None) | change(q, k, v)
    with pytest.raises(exception) as caught:
        ft.attention(**arguments, version="v03")
    assert type(caught.value) is exception
    for word in words:
        assert re.search(word, str(caught.value)), f"{word!r} is not in {str(caught.value)!r}"


@pytest.mark.parametrize("refusal", [name for name in REFUSALS if "no tensor" not in name and "string" not in name])
def test_operator_refuses_alike(refusal):
    change, exception, *words = REFUSALS[refusal]
    q, k, v = tensors("v03_warp_local")
    arguments = dict(q=q, k=k, v=v, causal=False, scale=None) | change(q, k, v)
    if "strange device" in refusal:
        pytest.skip("on meta tensors the operator itself answers with meta tensors, as every operator does")
    with pytest.raises(exception) as caught:
        operator("v03_warp_local")(**arguments)
    for word in words:
        assert re.search(word, str(caught.value)), f"{word!r} is not in {str(caught.value)!r}"


@every_version
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtype_is_refused_by_name(name, dtype):
    version = VERSIONS[name]
    if dtype in version.dtypes:
        pytest.skip(f"{name} takes {dtype}")
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
        dict(),
        dict(causal=True, scale=0.5),
        dict(queries=0),
        dict(keys=0),
        dict(head_dim=20),
        dict(permuted=True),
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
    out, lse = operator(name)(q, k, v)
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
    lengths = dict(queries=3, keys=3) | {long: 2**24 + 5}
    q, k, v = (
        torch.randn(1, 1, length, 128, device="cuda", dtype=getattr(torch, VERSIONS[name].dtypes[-1]))
        for length in (lengths["queries"], lengths["keys"], lengths["keys"])
    )
    if long == "keys":  # all the weight is on the last keys: an index that wraps around reads others
        q.abs_()
        k[:, :, :-70].abs_().neg_()
    out, lse = operator(name)(q, k, v, scale=1.0)
    shown = slice(-70, None)
    keys = slice(None) if long == "queries" else slice(-4096, None)
    judge(name, out[:, :, shown], lse[:, :, shown], q[:, :, shown], k[:, :, keys], v[:, :, keys], scale=1.0)
