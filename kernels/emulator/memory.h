// Global memory: the buffers that a launch may touch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace emulator {

struct Buffer {
    uintptr_t begin;
    size_t bytes;
    std::string name;
    bool writable;

    uintptr_t end() const { return begin + bytes; }
};

/// The declared buffers. They change only between launches.
std::vector<Buffer>& buffers();

}  // namespace emulator
