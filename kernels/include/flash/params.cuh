// What every attention kernel of the ladder is told, and how a kernel file registers itself.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flash {

enum class Dtype { float32, float16, bfloat16 };

/// One attention problem. The caller has made every tensor contiguous and 16-byte aligned, padded head_dim with zeros
/// to a size the kernel is compiled for, and checked every shape: a kernel may rely on all of it.
struct Params {
    const void* q;    // (batch, heads, queries, head_dim)
    const void* k;    // (batch, kv_heads, keys, head_dim)
    const void* v;    // (batch, kv_heads, keys, head_dim)
    void* out;        // (batch, heads, queries, head_dim), the inputs' dtype, uninitialised
    float* lse;       // (batch, heads, queries), natural log, uninitialised
    void* workspace;  // workspace_bytes(params) bytes, uninitialised

    int batch;
    int heads;  // a multiple of kv_heads: query head h reads K/V head h / (heads / kv_heads)
    int kv_heads;
    int queries;   // M >= 1
    int keys;      // N >= 0
    int head_dim;  // 32, 64 or 128
    Dtype dtype;   // of q, k, v and out; a kernel is only given those that versions.py says it takes
    float scale;   // any finite number; multiplies q.k before the mask and the maximum
    bool causal;   // query i sees keys j <= i + keys - queries
};

}  // namespace flash

// The C interface between a kernel's object file and the binding that libtorch sees (binding.cpp). FLASH_OP_NAME is
// given by the build: the name of the operator that this library implements.
extern "C" {
extern const char flash_op_name[];
size_t flash_workspace_bytes(const flash::Params* params);
void flash_attention(const flash::Params* params, void* stream);
}

#ifndef FLASH_OP_NAME
#define FLASH_OP_NAME "unnamed"
#endif

/// The last line of a kernel file. `launch(const Params&, void* stream)` enqueues the kernels;
/// `workspace_bytes(const Params&)` says how much scratch memory they need.
#define FLASH_REGISTER_WITH_WORKSPACE(launch, workspace_bytes)                                     \
    const char flash_op_name[] = FLASH_OP_NAME;                                                    \
    size_t flash_workspace_bytes(const flash::Params* params) { return workspace_bytes(*params); } \
    void flash_attention(const flash::Params* params, void* stream) { launch(*params, stream); }

#define FLASH_REGISTER(launch)                                       \
    const char flash_op_name[] = FLASH_OP_NAME;                      \
    size_t flash_workspace_bytes(const flash::Params*) { return 0; } \
    void flash_attention(const flash::Params* params, void* stream) { launch(*params, stream); }
