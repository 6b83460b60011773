#include "emulator/memory.h"

#include <algorithm>
#include <cstdio>

#include "emulator/machine.h"
#include "emulator/runtime.h"

namespace emulator {

constexpr uintptr_t kFar = 1 << 20;  // bytes from the nearest buffer at which naming it would mislead

static std::vector<Buffer> declared;

std::vector<Buffer>& buffers() { return declared; }

const Buffer* find_buffer(uintptr_t address, size_t bytes, bool write) {
    const Buffer* found = nullptr;
    for (const Buffer& buffer : declared) {
        if (!buffer.contains(address, bytes)) continue;
        found = &buffer;
        if (!write || buffer.writable) break;
    }
    return found;
}

static Finding* describe(Worker& worker, Kind kind, const Access& access) {
    Finding* finding = worker.occurred(kind, access.pc);
    if (finding == nullptr) return nullptr;
    finding->threads = {worker.running().number};
    finding->bytes = access.bytes;
    const size_t offset = worker.shared().offset(access.address, 1);
    if (offset != SharedMemory::kOutside) {
        finding->space = "shared";
        finding->offset = offset;
    } else if (const Buffer* buffer = find_buffer(access.address, 1, access.write)) {
        finding->space = "global";
        finding->buffer = buffer->name;
        finding->offset = access.address - buffer->begin;
    }
    return finding;
}

[[noreturn]] static void out_of_bounds(Worker& worker, const Access& access) {
    Finding* finding = describe(worker, Kind::out_of_bounds, access);
    if (finding == nullptr) worker.abandon();
    const SharedMemory& shared = worker.shared();
    std::vector<Buffer> regions = buffers();
    const auto add_shared = [&](const char* begin, size_t bytes, const char* name) {
        if (begin != nullptr) regions.push_back({reinterpret_cast<uintptr_t>(begin), bytes, name, true, nullptr});
    };
    add_shared(shared.dynamic_begin, shared.dynamic_bytes, "dynamic shared memory");
    add_shared(shared.static_begin, shared.static_bytes, "static shared memory");
    const auto distance = [&](const Buffer& region) -> uintptr_t {
        if (access.address + access.bytes <= region.begin) return region.begin - access.address;
        return access.address >= region.end() ? access.address - region.end() : 0;
    };
    const auto nearest = std::min_element(regions.begin(), regions.end(),
                                          [&](const Buffer& a, const Buffer& b) { return distance(a) < distance(b); });
    finding->detail = std::string(access.write ? "writes " : "reads ") + std::to_string(access.bytes) + " bytes ";
    if (distance(*nearest) > kFar) {
        char address[32];
        snprintf(address, sizeof address, "0x%zx", access.address);
        finding->space = "global";
        finding->detail += std::string("at address ") + address + ", far from every buffer";
    } else {
        const bool before = access.address < nearest->begin;
        const bool global = nearest - regions.begin() < static_cast<std::ptrdiff_t>(buffers().size());
        finding->space = global ? "global" : "shared";
        finding->buffer = global ? nearest->name : "";
        finding->offset = access.address - nearest->begin;
        finding->detail +=
            before ? "that begin " + std::to_string(nearest->begin - access.address) + " bytes before the start of "
                   : "that end " + std::to_string(access.address + access.bytes - nearest->end()) +
                         " bytes past the end of ";
        finding->detail +=
            (global ? '\'' + nearest->name + '\'' : nearest->name) + ", which has " + std::to_string(nearest->bytes);
    }
    worker.abandon();
}

[[noreturn]] static void write_to_input(Worker& worker, const Access& access) {
    if (Finding* finding = describe(worker, Kind::write_to_input, access))
        finding->detail = "writes to '" + finding->buffer + "', which the kernel may only read";
    worker.abandon();
}

[[noreturn]] static void misaligned(Worker& worker, const Access& access, unsigned alignment) {
    if (Finding* finding = describe(worker, Kind::misaligned, access))
        finding->detail = "an access of " + std::to_string(alignment) + " bytes at an address that is " +
                          std::to_string(access.address % alignment) + " more than a multiple of " +
                          std::to_string(alignment);
    worker.abandon();
}

Place check(Worker& worker, const Access& access, unsigned alignment) {
    Place place{Space::shared, worker.shared().offset(access.address, access.bytes)};
    if (place.where == SharedMemory::kOutside) {
        place = {Space::global, access.address};
        const Buffer* buffer = find_buffer(access.address, access.bytes, access.write);
        if (buffer == nullptr) {
            // A local array, or a constant that the compiler has put beside the code.
            if (worker.on_a_stack(access.address) || worker.launch().module.contains(access.address))
                return {Space::local, access.address};
            out_of_bounds(worker, access);
        }
        if (!buffer->allows(access)) write_to_input(worker, access);
        worker.recent_buffer(access.pc) = buffer;
    }
    if (access.address & (alignment - 1)) misaligned(worker, access, alignment);
    return place;
}

uint64_t check_shared(Worker& worker, const Access& access) {
    const Place place = check(worker, access);
    if (place.space == Space::shared) return place.where;
    if (Finding* finding = describe(worker, Kind::out_of_bounds, access)) {
        finding->space = "shared";
        finding->buffer = "";
        finding->offset = 0;
        finding->detail = "the instruction takes an address in shared memory, and this one is not";
    }
    worker.abandon();
}

}  // namespace emulator

void emulator_declare_global(const void* pointer, size_t bytes, const char* name, int writable) {
    if (bytes > 0)
        emulator::buffers().push_back({reinterpret_cast<uintptr_t>(pointer), bytes, name, writable != 0, nullptr});
}

void emulator_forget_globals() { emulator::buffers().clear(); }
