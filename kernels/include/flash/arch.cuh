// The architecture that code is compiled for.
#pragma once

namespace flash {

/// 80 in code for sm_80, and so on. The emulated builds, and the host's half of a GPU build, take the newest one's.
#ifdef __CUDA_ARCH__
constexpr int ARCH = __CUDA_ARCH__ / 10;
#else
constexpr int ARCH = 90;
#endif

}  // namespace flash
