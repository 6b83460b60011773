// ldmatrix and stmatrix: a warp moves 8x8 matrices of 16-bit elements between shared memory and fragments.
//
// Lane i gives the address of a row, 16 bytes, of matrix i / 8 (lanes beyond the last matrix: ignored, but still a
// valid address). Lane i holds, of each matrix, elements 2 (i % 4) and 2 (i % 4) + 1 of row i / 4, the lower in the
// lower half of the register: what mma.sync wants for its row-major operand. TRANSPOSED (.trans): of column i / 4
// instead.
#pragma once

#ifndef __CUDACC__
#include <emulator/cuda.h>
#endif

#include <cstdint>

namespace flash::ptx {

#ifdef __CUDACC__
/// Where `pointer` is in the shared-memory window: the 32-bit address that PTX takes.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
#endif

/// ldmatrix.sync.aligned.m8n8.x1[.trans].shared.b16
template <bool TRANSPOSED = false>
__device__ __forceinline__ void ldmatrix_x1(uint32_t (&fragment)[1], const void* row) {
#ifdef __CUDACC__
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                     : "=r"(fragment[0])
                     : "r"(shared_address(row))
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                     : "=r"(fragment[0])
                     : "r"(shared_address(row))
                     : "memory");
#else
    fragment[0] = emulator_ldmatrix(1, TRANSPOSED, row).r[0];
#endif
}

/// ldmatrix.sync.aligned.m8n8.x2[.trans].shared.b16
template <bool TRANSPOSED = false>
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&fragment)[2], const void* row) {
#ifdef __CUDACC__
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(fragment[0]), "=r"(fragment[1])
                     : "r"(shared_address(row))
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(fragment[0]), "=r"(fragment[1])
                     : "r"(shared_address(row))
                     : "memory");
#else
    const EmulatorFragment loaded = emulator_ldmatrix(2, TRANSPOSED, row);
    for (int i = 0; i < 2; ++i) fragment[i] = loaded.r[i];
#endif
}

/// ldmatrix.sync.aligned.m8n8.x4[.trans].shared.b16
template <bool TRANSPOSED = false>
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&fragment)[4], const void* row) {
#ifdef __CUDACC__
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                     : "r"(shared_address(row))
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                     : "r"(shared_address(row))
                     : "memory");
#else
    const EmulatorFragment loaded = emulator_ldmatrix(4, TRANSPOSED, row);
    for (int i = 0; i < 4; ++i) fragment[i] = loaded.r[i];
#endif
}

/// stmatrix.sync.aligned.m8n8.x1[.trans].shared.b16 (sm_90 and later)
template <bool TRANSPOSED = false>
__device__ __forceinline__ void stmatrix_x1(void* row, const uint32_t (&fragment)[1]) {
#ifdef __CUDACC__
    if constexpr (TRANSPOSED)
        asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(shared_address(row)),
                     "r"(fragment[0])
                     : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(shared_address(row)), "r"(fragment[0])
                     : "memory");
#else
    emulator_stmatrix(1, TRANSPOSED, row, {{fragment[0], 0, 0, 0}});
    emulator::keep_return_address();
#endif
}

/// stmatrix.sync.aligned.m8n8.x2[.trans].shared.b16 (sm_90 and later)
template <bool TRANSPOSED = false>
__device__ __forceinline__ void stmatrix_x2(void* row, const uint32_t (&fragment)[2]) {
#ifdef __CUDACC__
    if constexpr (TRANSPOSED)
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)),
                     "r"(fragment[0]), "r"(fragment[1])
                     : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)),
                     "r"(fragment[0]), "r"(fragment[1])
                     : "memory");
#else
    emulator_stmatrix(2, TRANSPOSED, row, {{fragment[0], fragment[1], 0, 0}});
    emulator::keep_return_address();
#endif
}

/// stmatrix.sync.aligned.m8n8.x4[.trans].shared.b16 (sm_90 and later)
template <bool TRANSPOSED = false>
__device__ __forceinline__ void stmatrix_x4(void* row, const uint32_t (&fragment)[4]) {
#ifdef __CUDACC__
    if constexpr (TRANSPOSED)
        asm volatile(
            "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
            "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
            : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                     "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
                     : "memory");
#else
    emulator_stmatrix(4, TRANSPOSED, row, {{fragment[0], fragment[1], fragment[2], fragment[3]}});
    emulator::keep_return_address();
#endif
}

}  // namespace flash::ptx
