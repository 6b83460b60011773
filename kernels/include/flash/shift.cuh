// A row's reference for exponentials that are one multiply-add and one power of 2.
#pragma once

#include "flash/launch.cuh"

namespace flash {

/// What a row's scores are taken relative to: P is 2^(factor (s - base) - scaled), and one of the two is 0. Most often
/// it is base, and this one multiply-add. But scaled, factor m, is rounded by up to 2^-24 of itself, and the product in
/// a multiply-add is not, so the power for the maximum m is not 1: far from 0 it even overflows. There base is m: s - m
/// is exact where it matters.
struct Shift {
    float base, scaled;

    __device__ __forceinline__ static Shift to(float m, float factor) {
        constexpr float LARGEST = 256;  // that is rounded by so little (2^-16) that powers are as exact as P
        const float scaled = m * factor;
        return fabsf(scaled) <= LARGEST || m == -INFINITY ? Shift{0, scaled} : Shift{m, 0};
    }
};

}  // namespace flash
