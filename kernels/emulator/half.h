// __half and __nv_bfloat16: storage, conversions that round to nearest even, and arithmetic that rounds after every
// step.
#pragma once

#include <math.h>

#include "emulator/vector_types.h"

namespace emulator {

inline float half_to_float(uint16_t h) {
    // Shifted into float's fields the exponent is 112 too small; multiplying by 2^112 mends that, subnormals included.
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const float magnitude = bit_cast<float>(static_cast<uint32_t>(h & 0x7fffu) << 13) * 0x1p112f;
    const uint32_t special = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;  // infinity and NaN keep their exponent
    return bit_cast<float>(bit_cast<uint32_t>(magnitude) | sign | special);
}

inline uint16_t float_to_half(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;          // the canonical NaN of the GPU
    if (magnitude >= 0x477ff000u) return sign | 0x7c00;  // 65520 and above round to infinity
    if (magnitude < 0x38800000u) {
        // Below 2^-14, a subnormal: adding 0.5 leaves its bits, rounded, at the bottom.
        const float shifted = bit_cast<float>(magnitude) + 0.5f;
        return sign | static_cast<uint16_t>(bit_cast<uint32_t>(shifted) - 0x3f000000u);
    }
    const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

inline float bfloat16_to_float(uint16_t b) { return bit_cast<float>(static_cast<uint32_t>(b) << 16); }

inline uint16_t float_to_bfloat16(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace emulator

#define EMULATOR_HALF_TYPE(type, pair, to_float, from_float)                                                   \
    struct type {                                                                                              \
        uint16_t bits;                                                                                         \
        constexpr type() : bits(0) {}                                                                          \
        type(float value) : bits(emulator::from_float(value)) {}                                               \
        operator float() const { return emulator::to_float(bits); }                                            \
    };                                                                                                         \
    struct alignas(4) pair {                                                                                   \
        type x, y;                                                                                             \
        constexpr pair() : x(), y() {}                                                                         \
        pair(type x, type y) : x(x), y(y) {}                                                                   \
        EMULATOR_VECTOR_COPY(pair, Word4)                                                                      \
    };                                                                                                         \
    inline type operator+(type a, type b) { return float(a) + float(b); }                                      \
    inline type operator-(type a, type b) { return float(a) - float(b); }                                      \
    inline type operator*(type a, type b) { return float(a) * float(b); }                                      \
    inline type operator/(type a, type b) { return float(a) / float(b); }                                      \
    inline type operator-(type a) { return -float(a); }                                                        \
    inline bool operator<(type a, type b) { return float(a) < float(b); }                                      \
    inline bool operator>(type a, type b) { return float(a) > float(b); }                                      \
    inline bool operator==(type a, type b) { return float(a) == float(b); }                                    \
    inline bool operator!=(type a, type b) { return float(a) != float(b); }                                    \
    inline type __hadd(type a, type b) { return a + b; }                                                       \
    inline type __hsub(type a, type b) { return a - b; }                                                       \
    inline type __hmul(type a, type b) { return a * b; }                                                       \
    inline type __hdiv(type a, type b) { return a / b; }                                                       \
    inline type __hfma(type a, type b, type c) { return fmaf(a, b, c); }                                       \
    inline type __hmax(type a, type b) { return fmaxf(a, b); }                                                 \
    inline type __hmin(type a, type b) { return fminf(a, b); }                                                 \
    inline pair __hadd2(pair a, pair b) { return pair(a.x + b.x, a.y + b.y); }                                 \
    inline pair __hsub2(pair a, pair b) { return pair(a.x - b.x, a.y - b.y); }                                 \
    inline pair __hmul2(pair a, pair b) { return pair(a.x * b.x, a.y * b.y); }                                 \
    inline pair __hfma2(pair a, pair b, pair c) { return pair(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)); } \
    inline pair __hmax2(pair a, pair b) { return pair(__hmax(a.x, b.x), __hmax(a.y, b.y)); }

EMULATOR_HALF_TYPE(__half, __half2, half_to_float, float_to_half)
EMULATOR_HALF_TYPE(__nv_bfloat16, __nv_bfloat162, bfloat16_to_float, float_to_bfloat16)
#undef EMULATOR_HALF_TYPE

using half = __half;
using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline float __half2float(__half x) { return x; }
inline __half2 __floats2half2_rn(float x, float y) { return __half2(x, y); }
inline __half2 __float22half2_rn(float2 x) { return __half2(x.x, x.y); }
inline __half2 __float2half2_rn(float x) { return __half2(x, x); }
inline __half2 __half2half2(__half x) { return __half2(x, x); }
inline __half2 __halves2half2(__half x, __half y) { return __half2(x, y); }
inline float2 __half22float2(__half2 x) { return float2(x.x, x.y); }
inline __half __ushort_as_half(unsigned short bits) { return emulator::bit_cast<__half>(bits); }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }

inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return __nv_bfloat162(x, y); }
inline __nv_bfloat162 __float22bfloat162_rn(float2 x) { return __nv_bfloat162(x.x, x.y); }
inline __nv_bfloat162 __float2bfloat162_rn(float x) { return __nv_bfloat162(x, x); }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return __nv_bfloat162(x, x); }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return __nv_bfloat162(x, y); }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return float2(x.x, x.y); }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return emulator::bit_cast<__nv_bfloat16>(bits); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
