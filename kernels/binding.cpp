// Makes a PyTorch operator of a kernel: the only file here that sees PyTorch, through its stable ABI. It is compiled
// once for CPU tensors (the emulator) and, with USE_CUDA, once for CUDA tensors; each kernel's object file is linked to
// one of the two. The operator's schema is defined in flash_tutorial/registry.py, its arguments are prepared by ops.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>

#include "flash/params.cuh"

#ifndef USE_CUDA
// The emulator's, found in the process: it reports an access outside of these, and a write to one that is not writable.
extern "C" {
void emulator_declare_global(const void* pointer, size_t bytes, const char* name, int writable);
void emulator_forget_globals();
}
#endif

namespace {

using torch::stable::Tensor;

/// Kernels rely on all of this without a check, so the operator stays safe for callers other than ops.py.
void check(const Tensor& tensor, const char* name, const Tensor& q) {
    STD_TORCH_CHECK(tensor.dim() == 4, name, ": (batch, heads, length, head_dim) is accepted, not ", tensor.dim(),
                    " dimensions");
    STD_TORCH_CHECK(tensor.scalar_type() == q.scalar_type(), name, ": q's dtype is accepted");
    STD_TORCH_CHECK(tensor.is_cuda() == q.is_cuda() && tensor.get_device_index() == q.get_device_index(), name,
                    ": q's device is accepted");
    STD_TORCH_CHECK(flash_strided || tensor.is_contiguous(), name, ": contiguous tensors are accepted");
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0, name,
                    ": 16-byte-aligned tensors are accepted");
    for (int dim = 0; dim < 4; ++dim) {
        STD_TORCH_CHECK(tensor.size(dim) <= std::numeric_limits<int>::max(), name, ": sizes below 2^31 are accepted");
        if (tensor.size(dim) <= 1 || tensor.numel() == 0) continue;  // its stride is never taken
        const bool fits = dim == 3 ? tensor.stride(dim) == 1 : tensor.stride(dim) * tensor.element_size() % 16 == 0;
        STD_TORCH_CHECK(fits, name, ": rows of neighbouring elements, a multiple of 16 bytes apart, are accepted");
    }
}

/// Along a dimension of one element as in a contiguous tensor, so that all are multiples of 16 bytes.
flash::Strides strides(const Tensor& tensor) {
    const int64_t row = tensor.size(3), head = tensor.size(2) * row, batch = tensor.size(1) * head;
    auto along = [&](int dim, int64_t contiguous) { return tensor.size(dim) <= 1 ? contiguous : tensor.stride(dim); };
    return {along(0, batch), along(1, head), along(2, row)};
}

flash::Dtype dtype(const Tensor& q) {
    switch (q.scalar_type()) {
        case torch::headeronly::ScalarType::Float: return flash::Dtype::float32;
        case torch::headeronly::ScalarType::Half: return flash::Dtype::float16;
        case torch::headeronly::ScalarType::BFloat16: return flash::Dtype::bfloat16;
        default: STD_TORCH_CHECK(false, "q: float32, float16 and bfloat16 are accepted");
    }
}

/// q (batch, heads, M, head_dim), k and v (batch, kv_heads, N, head_dim), the number of a tile shape or -1 for the
/// kernel's own choice → out (batch, heads, M, head_dim), lse (batch, heads, M), fp32, and the number of the tile shape
/// taken, -1 by a kernel without several.
std::tuple<Tensor, Tensor, int64_t> attention(Tensor q, Tensor k, Tensor v, bool causal, double scale, int64_t tiles) {
    check(q, "q", q);
    check(k, "k", q);
    check(v, "v", q);
    for (int dim = 0; dim < 4; ++dim) STD_TORCH_CHECK(k.size(dim) == v.size(dim), "v: k's shape is accepted");
    STD_TORCH_CHECK(k.size(0) == q.size(0) && k.size(3) == q.size(3), "k: q's batch and head_dim are accepted");
    STD_TORCH_CHECK(q.size(2) + k.size(2) <= std::numeric_limits<int>::max() - 1023,
                    "q, k: lengths are accepted whose sum, and a tile's more, are below 2^31");
    STD_TORCH_CHECK(k.size(1) == 0 ? q.size(1) == 0 : q.size(1) % k.size(1) == 0,
                    "q: a number of heads that is a multiple of k's is accepted");
    STD_TORCH_CHECK(std::isfinite(static_cast<float>(scale)), "scale: a finite number is accepted");
    STD_TORCH_CHECK(tiles >= -1 && tiles <= std::numeric_limits<int>::max(),
                    "tiles: -1 and small numbers are accepted");

    // Aliases of the inputs, so that the outputs' layout is what it is whatever q's strides are.
    Tensor out = torch::stable::new_empty(q, q.sizes());
    Tensor lse = torch::stable::new_empty(q, torch::headeronly::IntHeaderOnlyArrayRef(q.sizes().data(), 3),
                                          torch::headeronly::ScalarType::Float);
    if (out.numel() == 0) return {out, lse, -1};

    flash::Params params{};
    params.q = q.const_data_ptr();
    params.k = k.const_data_ptr();
    params.v = v.const_data_ptr();
    params.out = out.mutable_data_ptr();
    params.lse = static_cast<float*>(lse.mutable_data_ptr());
    params.q_strides = strides(q);
    params.k_strides = strides(k);
    params.v_strides = strides(v);
    params.batch = static_cast<int>(q.size(0));
    params.heads = static_cast<int>(q.size(1));
    params.kv_heads = static_cast<int>(k.size(1));
    params.queries = static_cast<int>(q.size(2));
    params.keys = static_cast<int>(k.size(2));
    params.head_dim = static_cast<int>(q.size(3));
    params.dtype = dtype(q);
    params.scale = static_cast<float>(scale);
    params.causal = causal;

#ifdef USE_CUDA
    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
#endif
    params.tiles = tiles < 0 ? flash_tiles(&params) : static_cast<int>(tiles);
    const int64_t workspace_bytes = static_cast<int64_t>(flash_workspace_bytes(&params));
    Tensor workspace = torch::stable::new_empty(q, {workspace_bytes}, torch::headeronly::ScalarType::Byte);
    params.workspace = workspace.mutable_data_ptr();

#ifdef USE_CUDA
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(q.get_device_index(), &stream));
    flash_attention(&params, stream);
#else
    const struct Globals {
        ~Globals() { emulator_forget_globals(); }
    } globals;
    emulator_forget_globals();
    auto declare = [](const Tensor& tensor, const char* name, bool writable) {
        int64_t elements = tensor.numel() > 0;  // from the first to the last one, with what is between them
        for (int dim = 0; dim < tensor.dim() && elements > 0; ++dim)
            elements += (tensor.size(dim) - 1) * tensor.stride(dim);
        emulator_declare_global(tensor.const_data_ptr(), elements * tensor.element_size(), name, writable);
    };
    declare(q, "q", false);
    declare(k, "k", false);
    declare(v, "v", false);
    declare(out, "out", true);
    declare(lse, "lse", true);
    declare(workspace, "workspace", true);
    flash_attention(&params, nullptr);
#endif
    return {out, lse, params.tiles};
}

}  // namespace

#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(flash_tutorial_kernels, CUDA, library) {
#else
STABLE_TORCH_LIBRARY_IMPL(flash_tutorial_kernels, CPU, library) {
#endif
    library.impl(flash_op_name, TORCH_BOX(&attention));
}
