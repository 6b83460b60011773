// A tile in shared memory whose rows ldmatrix reads without bank conflicts.
#pragma once

#include "flash/swizzle.cuh"

namespace flash {

/// ROWS x D elements of 16 bits, row after row, their chunks swizzled. Aligned to 128 bytes.
template <class Element, int ROWS, int D>
struct Tile {
    Element elements[ROWS][D];

    /// How far element (row, column) is from the first one.
    __device__ static int offset(int row, int column) { return row * D + swizzle<D>(row, column); }

    __device__ Element* at(int row, int column) { return &elements[0][0] + offset(row, column); }

    /// The element `rows` below and `columns` right of the one at `offset`, which is in one of the first 16 columns.
    /// `rows` are multiples of 8 and `columns` of 16, so they swizzle apart from it: where the compiler knows both, one
    /// XOR is all there is to compute.
    __device__ Element* beside(int offset, int rows, int columns) {
        constexpr int SPAN = D < 64 ? D : 64;  // columns whose chunks change places
        return &elements[0][0] + (offset ^ columns % SPAN) + columns / SPAN * SPAN + rows * D;
    }
};

/// The row of a tile, from a column on, that a lane names to ldmatrix of the first 16 x 16 block, and of all others:
/// one XOR away from the first one's if ENCODED, else computed anew.
template <bool ENCODED, class Tile>
struct LaneRow {
    Tile& tile;
    int row, column, offset = tile.offset(row, column);

    /// Of the block that begins at (first_row, first_column).
    __device__ auto* of(int first_row, int first_column) const {
        return ENCODED ? tile.beside(offset, first_row, first_column) : tile.at(row + first_row, column + first_column);
    }
};

}  // namespace flash
