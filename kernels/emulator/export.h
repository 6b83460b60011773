// How Python launches a small kernel by name: EMULATOR_EXPORT(kernel), which flash_tutorial/emulator.py writes after
// it.
#pragma once

#include <cstddef>
#include <cstdio>
#include <type_traits>
#include <utility>

#include "flash/launch.cuh"

namespace emulator {

/// A parameter's code: `f4` is a float of 4 bytes, `i4` and `u4` signed and unsigned whole numbers, `s12` a struct of
/// 12 bytes, `v0` void; before it `r` for a pointer to const elements of that type, `w` for one to elements to be
/// written.
struct Code {
    const char* pointer;
    char kind;
    size_t bytes;
};

template <class P>
Code code() {
    static_assert(std::is_trivially_copyable_v<P>, "a kernel's parameters are passed as bytes");
    using Value = std::remove_cv_t<std::remove_pointer_t<P>>;
    const char* pointer = !std::is_pointer_v<P> ? "" : std::is_const_v<std::remove_pointer_t<P>> ? "r" : "w";
    if constexpr (std::is_void_v<Value>) {
        return {pointer, 'v', 0};
    } else {
        const bool number = std::is_integral_v<Value>;
        const char kind = std::is_floating_point_v<Value> ? 'f' : !number ? 's' : std::is_signed_v<Value> ? 'i' : 'u';
        return {pointer, kind, sizeof(Value)};
    }
}

/// Writes the codes of a kernel's parameters to `text`, a space after each.
template <class... P>
void signature(void (*)(P...), char* text, size_t size) {
    size_t length = 0;
    auto write = [&](Code each) {
        if (length < size)
            length += snprintf(text + length, size - length, "%s%c%zu ", each.pointer, each.kind, each.bytes);
    };
    (write(code<P>()), ...);
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

#define EMULATOR_EXPORT(kernel)                                                                                   \
    extern "C" __attribute__((visibility("default"))) void emulator_signature_##kernel(char* text, size_t size) { \
        emulator::signature(&kernel, text, size);                                                                 \
    }                                                                                                             \
    extern "C" __attribute__((visibility("default"))) void emulator_launch_##kernel(                              \
        const unsigned* grid, const unsigned* block, size_t shared_bytes, void* const* arguments) {               \
        emulator::launch_by_pointers(&kernel, grid, block, shared_bytes, arguments);                              \
    }
