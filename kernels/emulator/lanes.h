// Sets of lanes, a bit for each: for (int lane : each(lanes)).
#pragma once

#include <cstdint>

namespace emulator {

constexpr int kWarpSize = 32;
constexpr uint32_t kAllLanes = ~uint32_t(0);

inline uint32_t bit(int index) { return uint32_t(1) << index; }
inline int first_of(uint32_t lanes) { return __builtin_ctz(lanes); }
inline unsigned number_of(uint32_t lanes) { return static_cast<unsigned>(__builtin_popcount(lanes)); }

/// The set bits of `lanes`, the lowest first.
struct each {
    struct Iterator {
        uint32_t rest;
        int operator*() const { return first_of(rest); }
        void operator++() { rest &= rest - 1; }
        bool operator!=(const Iterator&) const { return rest != 0; }
    };
    uint32_t lanes;

    explicit each(uint32_t lanes) : lanes(lanes) {}
    Iterator begin() const { return {lanes}; }
    Iterator end() const { return {0}; }
};

/// visit(lane) for each of them. Most often they are all there, and then this loop is the one that compilers do well.
template <class Visit>
inline void for_each_lane(uint32_t lanes, Visit visit) {
    if (lanes == kAllLanes)
        for (int lane = 0; lane < kWarpSize; ++lane) visit(lane);
    else
        for (int lane : each(lanes)) visit(lane);
}

}  // namespace emulator
