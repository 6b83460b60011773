// What every attention kernel of the ladder is told, and how a kernel file registers itself.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flash {

enum class Dtype { float32, float16, bfloat16 };

/// How many elements a (batch, heads, length, head_dim) tensor's neighbours along a dimension are apart; those along
/// head_dim are next to each other. Multiples of 16 bytes, that may be 0 (one head, expanded to several), negative
/// never.
struct Strides {
    int64_t batch, head, row;
};

/// One attention problem. The caller has aligned every tensor to 16 bytes, padded head_dim with zeros to a size the
/// kernel is compiled for, and checked every shape: a kernel may rely on all of it. Everything is contiguous, except q,
/// k and v of a kernel that registers itself as strided.
struct Params {
    const void* q;    // (batch, heads, queries, head_dim)
    const void* k;    // (batch, kv_heads, keys, head_dim)
    const void* v;    // (batch, kv_heads, keys, head_dim)
    void* out;        // (batch, heads, queries, head_dim), the inputs' dtype, uninitialised
    float* lse;       // (batch, heads, queries), natural log, uninitialised
    void* workspace;  // workspace_bytes(params) bytes, uninitialised

    Strides q_strides, k_strides, v_strides;

    int batch;
    int heads;  // a multiple of kv_heads: query head h reads K/V head h / (heads / kv_heads)
    int kv_heads;
    int queries;   // M >= 1
    int keys;      // N >= 0
    int head_dim;  // 32, 64 or 128
    Dtype dtype;   // of q, k, v and out; a kernel is only given those that versions.py says it takes
    float scale;   // any finite number; multiplies q.k before the mask and the maximum
    bool causal;   // query i sees keys j <= i + keys - queries

    int tiles;  // the number of the tile shape to take; -1 where a kernel has but one
};

}  // namespace flash

// The C interface between a kernel's object file and the binding that libtorch sees (binding.cpp). FLASH_OP_NAME is
// given by the build: the name of the operator that this library implements.
extern "C" {
extern const char flash_op_name[];
extern const bool flash_strided;
int flash_tiles(const flash::Params* params);
size_t flash_workspace_bytes(const flash::Params* params);
void flash_attention(const flash::Params* params, void* stream);
}

#ifndef FLASH_OP_NAME
#define FLASH_OP_NAME "unnamed"
#endif

namespace flash {

inline size_t no_workspace(const Params&) { return 0; }
inline int only_tiles(const Params&) { return -1; }

}  // namespace flash

/// The last line of a kernel file is one of the four below. `launch(const Params&, void* stream)` enqueues the kernels.
#define FLASH_REGISTER(launch) FLASH_REGISTER_ALL(launch, flash::no_workspace, false, flash::only_tiles)

/// `workspace_bytes(const Params&)` says how much scratch memory they need.
#define FLASH_REGISTER_WITH_WORKSPACE(launch, workspace_bytes) \
    FLASH_REGISTER_ALL(launch, workspace_bytes, false, flash::only_tiles)

/// q, k and v may have any strides that Strides can have. In versions.py: strided=True.
#define FLASH_REGISTER_STRIDED(launch) FLASH_REGISTER_ALL(launch, flash::no_workspace, true, flash::only_tiles)

/// Strided, and with several tile shapes, numbered from 0. `choose_tiles(const Params&)` is the number that the kernel
/// takes of its own accord; `launch` finds it in params.tiles, or another that was asked for, and throws
/// std::runtime_error for one that there is not. In versions.py: the words of the option "tiles", "auto" first.
#define FLASH_REGISTER_TILED(launch, choose_tiles) FLASH_REGISTER_ALL(launch, flash::no_workspace, true, choose_tiles)

#define FLASH_REGISTER_ALL(launch, workspace_bytes, strided, choose_tiles)                         \
    const char flash_op_name[] = FLASH_OP_NAME;                                                    \
    const bool flash_strided = strided;                                                            \
    int flash_tiles(const flash::Params* params) { return choose_tiles(*params); }                 \
    size_t flash_workspace_bytes(const flash::Params* params) { return workspace_bytes(*params); } \
    void flash_attention(const flash::Params* params, void* stream) { launch(*params, stream); }
