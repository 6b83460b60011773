// Four floats at a time: one 16-byte access, and the algebra on them.
#pragma once

#include "flash/launch.cuh"

namespace flash {

/// p is 16-byte aligned.
__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ __forceinline__ void store4(float* p, float4 x) { *reinterpret_cast<float4*>(p) = x; }

__device__ __forceinline__ float4 scaled(float a, float4 x) { return float4{a * x.x, a * x.y, a * x.z, a * x.w}; }
__device__ __forceinline__ float4 add_scaled(float4 sum, float a, float4 x) {
    return float4{sum.x + a * x.x, sum.y + a * x.y, sum.z + a * x.z, sum.w + a * x.w};
}

}  // namespace flash
