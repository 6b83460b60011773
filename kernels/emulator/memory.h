// What an address is: a block's shared memory, a global buffer, a thread's own, or nothing a kernel may touch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace emulator {

class GlobalShadow;
class Worker;

struct Access {
    uintptr_t address;
    unsigned bytes;
    bool write;
    uint32_t pc;
};

/// A block's shared memory: the dynamic part, then the module's __shared__ arrays. Where something lies in it is said
/// by an offset that counts through both; its remainder by 128 gives the bank.
struct SharedMemory {
    static constexpr size_t kOutside = SIZE_MAX;

    char* dynamic_begin = nullptr;
    size_t dynamic_bytes = 0;
    char* static_begin = nullptr;
    size_t static_bytes = 0;

    size_t static_offset() const { return (dynamic_bytes + 127) / 128 * 128; }
    size_t end_offset() const { return static_offset() + static_bytes; }
    size_t offset(uintptr_t address, size_t bytes) const {
        const size_t in_dynamic = address - reinterpret_cast<uintptr_t>(dynamic_begin);
        if (in_dynamic < dynamic_bytes) return bytes <= dynamic_bytes - in_dynamic ? in_dynamic : kOutside;
        const size_t in_static = address - reinterpret_cast<uintptr_t>(static_begin);
        return in_static < static_bytes && bytes <= static_bytes - in_static ? static_offset() + in_static : kOutside;
    }
};

/// Global memory: a buffer that a launch may touch.
struct Buffer {
    uintptr_t begin;
    size_t bytes;
    std::string name;
    bool writable;
    std::shared_ptr<GlobalShadow> shadow;  // races.cpp's, from the first instrumented launch on; null if only read

    uintptr_t end() const { return begin + bytes; }
    bool contains(uintptr_t address, size_t size) const { return address >= begin && address + size <= end(); }
    bool allows(const Access& access) const {
        return contains(access.address, access.bytes) && (writable || !access.write);
    }
};

/// The declared buffers. They change only between launches.
std::vector<Buffer>& buffers();
/// The buffer that holds these bytes: one that may be written if there is one and `write`. Null if none does.
const Buffer* find_buffer(uintptr_t address, size_t bytes, bool write);

enum class Space { shared, global, local };

struct Place {
    Space space;
    uint64_t where;  // an offset in shared memory, else the address
};

/// Where the running thread is about to access memory. Does not return if a GPU would not survive the access.
Place check(Worker& worker, const Access& access, unsigned alignment);
/// The same for an instruction that takes shared memory only: the offset.
uint64_t check_shared(Worker& worker, const Access& access);

}  // namespace emulator
