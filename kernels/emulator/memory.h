// Global memory: the buffers that a launch may touch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace emulator {

/// Who touched which part of a buffer (races.cpp).
class GlobalShadow;

struct Buffer {
    uintptr_t begin;
    size_t bytes;
    std::string name;
    bool writable;
    std::shared_ptr<GlobalShadow> shadow;  // made for the first instrumented launch; none if the buffer is only read

    uintptr_t end() const { return begin + bytes; }
    bool contains(uintptr_t address, size_t size) const { return address >= begin && address + size <= end(); }
};

/// The declared buffers. They change only between launches.
std::vector<Buffer>& buffers();

}  // namespace emulator
