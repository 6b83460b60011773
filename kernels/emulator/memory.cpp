#include "emulator/memory.h"

#include "emulator/runtime.h"

namespace emulator {

static std::vector<Buffer> declared;

std::vector<Buffer>& buffers() { return declared; }

}  // namespace emulator

void emulator_declare_global(const void* pointer, size_t bytes, const char* name, int writable) {
    if (bytes == 0) return;
    emulator::buffers().push_back({reinterpret_cast<uintptr_t>(pointer), bytes, name, writable != 0, nullptr});
}

void emulator_forget_globals() { emulator::buffers().clear(); }
