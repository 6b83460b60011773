// What one warp-level memory instruction costs, as Nsight Compute counts it on an H200. Pure functions of its
// addresses.
#pragma once

#include <cstdint>

namespace emulator {

/// Passes through the 32 banks (4 bytes wide) of shared memory.
struct Wavefronts {
    unsigned taken = 0;
    unsigned ideal = 0;  // without bank conflicts
};

/// Lane l of `lanes` accesses `bytes` at addresses[l].
Wavefronts shared_wavefronts(const uint64_t* addresses, uint32_t lanes, unsigned bytes, bool load);

/// ldmatrix and stmatrix: lanes 8m to 8m + 7 give the addresses of the 16-byte rows of matrix m.
Wavefronts matrix_wavefronts(const uint64_t* addresses, int matrices);

/// 32-byte pieces of global memory, counted from `origin`, that the lanes touch: each costs one, however many lanes
/// share it.
unsigned sectors(const uint64_t* addresses, uint32_t lanes, unsigned bytes, uint64_t origin);

/// The same for cp.async.cg, which bypasses L1. An H200 was seen to count pairs of a 32-byte piece of the destination
/// and the 128-byte line that it is filled from.
unsigned bypassing_sectors(const uint64_t* shared, const uint64_t* global, uint32_t lanes, uint64_t origin);

}  // namespace emulator
