// Swizzling: a permutation of the 16-byte chunks of a tile's rows that keeps them out of each other's banks.
#pragma once

#ifndef __CUDACC__
#include <emulator/cuda.h>
#endif

namespace flash {

/// The column at which a tile with rows of D 16-bit elements keeps its element (row, column): chunks of 8 elements
/// change places within 128 bytes, which is what 32 banks hold, by an XOR with the number of the row. A column's chunks
/// in 8 neighbouring rows are then in 8 different places; so are, as before, the chunks of a row.
template <int D>
__device__ __forceinline__ int swizzle(int row, int column) {
    static_assert(D == 32 || D % 64 == 0, "rows are half of 128 bytes, or a multiple of it");
    constexpr int CHUNKS = D == 32 ? 4 : 8;  // of a row, that change places
    constexpr int ROWS = 8 / CHUNKS;         // that share 128 bytes
    return column ^ row / ROWS % CHUNKS * 8;
}

}  // namespace flash
