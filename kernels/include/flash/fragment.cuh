// Elements of 16 bits: the types of a kernel for tensor cores, and how two numbers become one register of a fragment.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include <emulator/cuda.h>
#endif

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "flash/params.cuh"

namespace flash {

/// Both numbers rounded to Element, __half or __nv_bfloat16, the first in the lower half.
template <class Element>
__device__ __forceinline__ uint32_t pack(float first, float second) {
    static_assert(std::is_same_v<Element, __half> || std::is_same_v<Element, __nv_bfloat16>, "a type of 16 bits");
    uint32_t bits;
    if constexpr (std::is_same_v<Element, __half>) {
        const __half2 pair = __floats2half2_rn(first, second);
        memcpy(&bits, &pair, sizeof(bits));
    } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
        memcpy(&bits, &pair, sizeof(bits));
    }
    return bits;
}

/// Calls body(Element()) for the 16-bit type that `dtype` names.
template <class Body>
void dispatch_element(Dtype dtype, Body body) {
    switch (dtype) {
        case Dtype::float16: return body(__half());
        case Dtype::bfloat16: return body(__nv_bfloat16());
        default: throw std::runtime_error("this kernel takes float16 and bfloat16");
    }
}

}  // namespace flash
