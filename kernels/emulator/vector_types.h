// CUDA's vector types and dim3.
#pragma once

#include <cstdint>
#include <cstring>

namespace emulator {

template <class To, class From>
inline __attribute__((always_inline)) To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    __builtin_memcpy(static_cast<void*>(&to), &from, sizeof(To));
    return to;
}

typedef uint32_t Word4 __attribute__((may_alias));
typedef uint64_t Word8 __attribute__((may_alias));
typedef uint32_t Word16 __attribute__((vector_size(16), may_alias));

}  // namespace emulator

// A plain struct's copy is split by the compiler into one access for each member. These copy through one word of their
// whole size, so that a float4 load is one 16-byte access for the counters, as it is one LDG.128 on the GPU.
//
// Their default constructors are constant so that a __shared__ array of them needs no initialisation when a thread
// first comes by it, which would show as an access.
#define EMULATOR_VECTOR_COPY(name, word)                                                             \
    inline __attribute__((always_inline)) name(const name& other) {                                  \
        *reinterpret_cast<emulator::word*>(this) = *reinterpret_cast<const emulator::word*>(&other); \
    }                                                                                                \
    inline __attribute__((always_inline)) name& operator=(const name& other) {                       \
        *reinterpret_cast<emulator::word*>(this) = *reinterpret_cast<const emulator::word*>(&other); \
        return *this;                                                                                \
    }

#define EMULATOR_VECTOR2(name, type, word)             \
    struct alignas(2 * sizeof(type)) name {            \
        type x, y;                                     \
        constexpr name() : x(), y() {}                 \
        constexpr name(type x, type y) : x(x), y(y) {} \
        EMULATOR_VECTOR_COPY(name, word)               \
    };                                                 \
    inline name make_##name(type x, type y) { return name(x, y); }

#define EMULATOR_VECTOR4(name, type, word)                                         \
    struct alignas(4 * sizeof(type)) name {                                        \
        type x, y, z, w;                                                           \
        constexpr name() : x(), y(), z(), w() {}                                   \
        constexpr name(type x, type y, type z, type w) : x(x), y(y), z(z), w(w) {} \
        EMULATOR_VECTOR_COPY(name, word)                                           \
    };                                                                             \
    inline name make_##name(type x, type y, type z, type w) { return name(x, y, z, w); }

EMULATOR_VECTOR2(short2, short, Word4)
EMULATOR_VECTOR2(ushort2, unsigned short, Word4)
EMULATOR_VECTOR2(int2, int, Word8)
EMULATOR_VECTOR2(uint2, unsigned, Word8)
EMULATOR_VECTOR2(float2, float, Word8)
EMULATOR_VECTOR2(longlong2, long long, Word16)
EMULATOR_VECTOR2(ulonglong2, unsigned long long, Word16)
EMULATOR_VECTOR2(double2, double, Word16)
EMULATOR_VECTOR4(char4, signed char, Word4)
EMULATOR_VECTOR4(uchar4, unsigned char, Word4)
EMULATOR_VECTOR4(short4, short, Word8)
EMULATOR_VECTOR4(ushort4, unsigned short, Word8)
EMULATOR_VECTOR4(int4, int, Word16)
EMULATOR_VECTOR4(uint4, unsigned, Word16)
EMULATOR_VECTOR4(float4, float, Word16)
#undef EMULATOR_VECTOR2
#undef EMULATOR_VECTOR4

#define EMULATOR_VECTOR3(name, type) /* no 12-byte access exists: three of 4 bytes, on the GPU too */ \
    struct name {                                                                                     \
        type x, y, z;                                                                                 \
    };                                                                                                \
    inline name make_##name(type x, type y, type z) { return {x, y, z}; }
EMULATOR_VECTOR3(int3, int)
EMULATOR_VECTOR3(uint3, unsigned)
EMULATOR_VECTOR3(float3, float)
#undef EMULATOR_VECTOR3

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 size) : x(size.x), y(size.y), z(size.z) {}
};
