// cp.async. A copy lands when its thread waits for it, not before, and until then its destination reads as NaN: a
// missing wait shows, where on a GPU it might go unnoticed for years.
#include <algorithm>
#include <cstring>

#include "emulator/machine.h"
#include "emulator/runtime.h"
#include "emulator/trace.h"

using namespace emulator;

void emulator_cp_async(void* shared, const void* global, unsigned bytes, unsigned source_bytes, bool bypass_l1) {
    Worker& worker = *current_worker;
    const AsyncCopy copy{static_cast<char*>(shared), static_cast<const char*>(global), static_cast<uint8_t>(bytes),
                         static_cast<uint8_t>(std::min(source_bytes, bytes)), worker.pc(__builtin_return_address(0))};
    if (Trace* trace = worker.trace()) trace->copy_issued(copy, bypass_l1);
    memset(shared, 0xff, bytes);
    worker.running().copies.push_back(copy);
}

void emulator_cp_async_commit() {
    Thread& thread = current_worker->running();
    thread.groups.push_back(static_cast<int>(thread.copies.size()) - thread.committed);
    thread.committed = static_cast<int>(thread.copies.size());
}

void emulator_cp_async_wait(int pending) {
    Worker& worker = *current_worker;
    Thread& thread = worker.running();
    std::ptrdiff_t groups = 0, landing = 0;
    if (pending < 0) {
        groups = static_cast<std::ptrdiff_t>(thread.groups.size());
        landing = static_cast<std::ptrdiff_t>(thread.copies.size());
    } else {
        while (static_cast<std::ptrdiff_t>(thread.groups.size()) - groups > pending)
            landing += thread.groups[static_cast<size_t>(groups++)];
    }
    for (std::ptrdiff_t i = 0; i < landing; ++i) {
        const AsyncCopy& copy = thread.copies[static_cast<size_t>(i)];
        memcpy(copy.shared, copy.global, copy.source_bytes);
        memset(copy.shared + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
        if (Trace* trace = worker.trace()) trace->copy_landed(copy);
    }
    thread.copies.erase(thread.copies.begin(), thread.copies.begin() + landing);
    thread.groups.erase(thread.groups.begin(), thread.groups.begin() + groups);
    thread.committed = std::max(0, thread.committed - static_cast<int>(landing));
}
