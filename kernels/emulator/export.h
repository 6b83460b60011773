// How Python launches a small kernel by name: EMULATOR_EXPORT(kernel), which flash_tutorial/emulator.py writes after
// it.
#pragma once

#include <cstddef>
#include <string>
#include <type_traits>
#include <utility>

#include "flash/launch.cuh"

namespace emulator {

/// `f4` is a float of 4 bytes, `i4` and `u4` signed and unsigned whole numbers, `s12` a struct of 12 bytes, `v0` void.
template <class T>
std::string type_code() {
    if constexpr (std::is_void_v<T>) {
        return "v0";
    } else {
        const char* kind = std::is_floating_point_v<T> ? "f"
                           : !std::is_integral_v<T>    ? "s"
                           : std::is_signed_v<T>       ? "i"
                                                       : "u";
        return kind + std::to_string(sizeof(T));
    }
}

/// A parameter's code: its type's, after `r` for a pointer to const elements, `w` for one to elements that may be
/// written.
template <class P>
std::string parameter_code() {
    static_assert(std::is_trivially_copyable_v<P>, "a kernel's parameters are passed as bytes");
    if constexpr (std::is_pointer_v<P>) {
        using Element = std::remove_pointer_t<P>;
        return (std::is_const_v<Element> ? "r" : "w") + type_code<std::remove_cv_t<Element>>();
    } else {
        return type_code<P>();
    }
}

/// The codes of a kernel's parameters, separated by spaces.
template <class... P>
const char* signature(void (*)(P...)) {
    static const std::string codes = ((parameter_code<P>() + " ") + ... + std::string());
    return codes.c_str();
}

template <class... P, size_t... I>
void launch_packed(void (*kernel)(P...), const unsigned* grid, const unsigned* block, size_t shared_bytes,
                   void* const* arguments, std::index_sequence<I...>) {
    flash::launch(kernel, dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]), shared_bytes, nullptr,
                  *static_cast<P*>(arguments[I])...);
}

/// As CUDA's cudaLaunchKernel: `arguments` points to the value of each parameter.
template <class... P>
void launch_by_pointers(void (*kernel)(P...), const unsigned* grid, const unsigned* block, size_t shared_bytes,
                        void* const* arguments) {
    launch_packed(kernel, grid, block, shared_bytes, arguments, std::index_sequence_for<P...>());
}

}  // namespace emulator

#define EMULATOR_EXPORT(kernel)                                                                     \
    extern "C" __attribute__((visibility("default"))) const char* emulator_signature_##kernel() {   \
        return emulator::signature(&kernel);                                                        \
    }                                                                                               \
    extern "C" __attribute__((visibility("default"))) void emulator_launch_##kernel(                \
        const unsigned* grid, const unsigned* block, size_t shared_bytes, void* const* arguments) { \
        emulator::launch_by_pointers(&kernel, grid, block, shared_bytes, arguments);                \
    }
