// What the lanes that share a row of an accumulator find out together.
#pragma once

#include "flash/launch.cuh"

namespace flash {

constexpr unsigned ALL_LANES = 0xffffffff;

/// Over the 4 lanes that hold a row of an mma.sync's accumulator, which are neighbours; each gets the result. All lanes
/// of the warp call it.
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

}  // namespace flash
