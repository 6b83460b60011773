// mma.sync: a warp multiplies small matrices on a tensor core.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include <emulator/cuda.h>
#endif

#include <cstdint>
#include <type_traits>

namespace flash::ptx {

/// mma.sync.aligned.m16n8k16.row.col.f32.Element.Element.f32: d += a b, with a (16, 16), b (16, 8) and d (16, 8) spread
/// over the warp; Element is __half or __nv_bfloat16. With g = lane / 4 and p = 2 (lane % 4), a lane holds
///     a[0] (g, p), (g, p + 1)            a[1] (g + 8, p), (g + 8, p + 1)
///     a[2] (g, p + 8), (g, p + 9)        a[3] (g + 8, p + 8), (g + 8, p + 9)
///     b[0] (p, g), (p + 1, g)            b[1] (p + 8, g), (p + 9, g)
///     d[0] (g, p)    d[1] (g, p + 1)     d[2] (g + 8, p)    d[3] (g + 8, p + 1)
/// Registers of a and b hold two elements, the first in the lower half.
template <class Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    constexpr bool bfloat16 = std::is_same_v<Element, __nv_bfloat16>;
    static_assert(bfloat16 || std::is_same_v<Element, __half>, "__half or __nv_bfloat16");
#ifdef __CUDACC__
    if constexpr (bfloat16)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    const EmulatorAccumulator sum =
        emulator_mma_m16n8k16(bfloat16, {{a[0], a[1], a[2], a[3]}}, b[0], b[1], {{d[0], d[1], d[2], d[3]}});
    for (int i = 0; i < 4; ++i) d[i] = sum.r[i];
#endif
}

}  // namespace flash::ptx
