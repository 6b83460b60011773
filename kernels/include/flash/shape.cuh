// Tile shapes: what a kernel that is compiled for several of them knows about one, and the way from a number to it.
#pragma once

#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "flash/launch.cuh"

namespace flash {

/// Tiles of BLOCK_Q queries and of BLOCK_KV keys, the warps that share the queries, and how many tiles of K, and of V,
/// are in shared memory.
template <int BLOCK_Q_, int BLOCK_KV_, int WARPS_, int STAGES_>
struct Shape {
    static constexpr int BLOCK_Q = BLOCK_Q_, BLOCK_KV = BLOCK_KV_, WARPS = WARPS_, STAGES = STAGES_;
    static constexpr int THREADS = WARPS * 32;
    static constexpr int BANDS = BLOCK_Q / WARPS / 16;  // of 16 rows, an mma.sync's, that a warp owns
    static_assert(BANDS * WARPS * 16 == BLOCK_Q, "a warp owns whole bands");
    static_assert(BLOCK_KV % 16 == 0, "16 keys are one step of P V");
};

/// Of what a lane holds of all bands of an accumulator, what it holds of band t.
template <int NUMBERS>
__device__ float (&band(float (&numbers)[NUMBERS], int t))[4] {
    return reinterpret_cast<float (&)[4]>(numbers[4 * t]);
}

/// Calls body(Shape()) for shape number `tiles` of the tuple Shapes. Only those are compiled that are numbered ONLY, or
/// all if that is -1. Throws std::runtime_error for another number.
template <class Shapes, int ONLY, class Body, int... NUMBERS>
void dispatch_shape(int tiles, Body body, std::integer_sequence<int, NUMBERS...>) {
    auto call = [&](auto number) {
        constexpr bool compiled = ONLY == -1 || ONLY == number;
        if constexpr (compiled) {
            if (tiles == number) body(std::tuple_element_t<number, Shapes>());
        }
        return compiled && tiles == number;
    };
    if (!(call(std::integral_constant<int, NUMBERS>()) || ...))
        throw std::runtime_error("tile shape " + std::to_string(tiles) + " is not compiled");
}

template <class Shapes, int ONLY, class Body>
void dispatch_shape(int tiles, Body body) {
    constexpr int COUNT = std::tuple_size_v<Shapes>;
    dispatch_shape<Shapes, ONLY>(tiles, body, std::make_integer_sequence<int, COUNT>());
}

}  // namespace flash
