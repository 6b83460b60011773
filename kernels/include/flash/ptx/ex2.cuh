// ex2: a power of 2, the one exponential that the hardware has.
#pragma once

#ifndef __CUDACC__
#include <emulator/cuda.h>
#endif

namespace flash::ptx {

/// ex2.approx.ftz.f32: 2^x with a relative error of 2^-22 at most; what would be below 2^-126 is 0, and so is x there.
__device__ __forceinline__ float ex2(float x) {
#ifdef __CUDACC__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0 : y;
#endif
}

}  // namespace flash::ptx
