// Launches: which module, how many OS threads, progress and cancelling, and faults in kernel code.
#include <limits.h>
#include <link.h>
#include <stdlib.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "emulator/faults.h"
#include "emulator/machine.h"
#include "emulator/runtime.h"
#include "emulator/trace.h"

extern "C" void* __tls_get_addr(void*);

namespace emulator {

// ---- the module that a kernel is in

Module Module::containing(const void* address) {
    struct Search {
        uintptr_t address;
        Module module;
    } search{reinterpret_cast<uintptr_t>(address), Module()};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* argument) {
            Search& search = *static_cast<Search*>(argument);
            Module module;
            module.base = info->dlpi_addr;
            module.begin = UINTPTR_MAX;
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                const auto& segment = info->dlpi_phdr[i];
                if (segment.p_type == PT_LOAD) {
                    module.begin = std::min<uintptr_t>(module.begin, info->dlpi_addr + segment.p_vaddr);
                    module.end = std::max<uintptr_t>(module.end, info->dlpi_addr + segment.p_vaddr + segment.p_memsz);
                } else if (segment.p_type == PT_TLS) {
                    module.tls_id = info->dlpi_tls_modid;
                    module.tls_bytes = segment.p_memsz;
                }
            }
            if (search.address < module.begin || search.address >= module.end) return 0;
            char path[PATH_MAX];
            module.path = realpath(info->dlpi_name, path) != nullptr ? path : info->dlpi_name;
            search.module = module;
            return 1;
        },
        &search);
    return search.module;
}

char* Module::static_shared() const {
    if (tls_id == 0) return nullptr;
    size_t index[2] = {tls_id, 0};  // the dynamic linker's tls_index: it makes
                                    // this OS thread's copy if there is none yet
    return static_cast<char*>(__tls_get_addr(index));
}

// ---- state of the process

static struct {
    std::mutex launching;  // one launch at a time: it uses every core as it is
    std::mutex mutex;      // guards what follows
    int threads = 0;
    size_t shared_limit = 0;
    int (*tick)(uint64_t, uint64_t) = nullptr;
    std::vector<LaunchRecord> launches;
    std::string json;
    std::vector<std::unique_ptr<Worker>> idle;  // workers of earlier launches
    uint32_t next_block_id = 1;
} process;

static std::unique_ptr<Worker> take_worker() {
    std::lock_guard<std::mutex> lock(process.mutex);
    if (process.idle.empty()) return std::make_unique<Worker>();
    std::unique_ptr<Worker> worker = std::move(process.idle.back());
    process.idle.pop_back();
    return worker;
}

static void give_back(std::unique_ptr<Worker> worker) {
    std::lock_guard<std::mutex> lock(process.mutex);
    process.idle.push_back(std::move(worker));
}

static int worker_count(const Launch& launch) {
    const int wanted = process.threads > 0 ? process.threads : static_cast<int>(std::thread::hardware_concurrency());
    // A stack and its guard page are two of the 65,530 mappings that Linux gives a process.
    const int mappings = std::max(1, 40000 / (2 * launch.threads));
    return static_cast<int>(std::min<uint64_t>(launch.blocks, static_cast<uint64_t>(std::clamp(wanted, 1, mappings))));
}

// ---- running a launch

/// Why CUDA would refuse this launch; empty if it would not.
static std::string refusal(const Launch& launch) {
    const unsigned *grid = launch.grid, *block = launch.block;
    const uint64_t threads = uint64_t(block[0]) * block[1] * block[2];
    if (threads == 0 || threads > kMaxThreads || block[2] > 64)
        return "a block has 1 to 1024 threads, at most 64 of them along z";
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0) return "a grid has at least one block";
    if (grid[0] > INT_MAX || grid[1] > 65535 || grid[2] > 65535)
        return "a grid has at most 2147483647 x 65535 x 65535 blocks";
    return "";
}

static void run(Launch& launch, LaunchRecord& record) {
    const FaultHandlers fault_handlers;
    std::mutex mutex;
    std::condition_variable changed;
    int working = worker_count(launch);
    std::vector<std::unique_ptr<Worker>> workers;
    std::vector<std::thread> os_threads;
    for (int i = 0; i < working; ++i) workers.push_back(take_worker());
    for (auto& worker : workers)
        os_threads.emplace_back([&] {
            worker->run(launch);
            std::lock_guard<std::mutex> lock(mutex);
            --working;
            changed.notify_one();
        });
    {
        std::unique_lock<std::mutex> lock(mutex);
        while (!changed.wait_for(lock, std::chrono::milliseconds(100), [&] { return working == 0; })) {
            if (launch.stop)
                for (std::thread& os_thread : os_threads) interrupt(os_thread.native_handle());
            if (process.tick == nullptr || launch.stop) continue;
            lock.unlock();
            if (process.tick(launch.blocks_done, launch.blocks) != 0 && !launch.stop.exchange(true)) {
                Finding* finding = record.findings.occurred(Kind::cancelled);
                finding->detail = "the launch was cancelled";
            }
            lock.lock();
        }
    }
    for (std::thread& os_thread : os_threads) os_thread.join();
    for (auto& worker : workers) {
        record.findings.merge(worker->findings());
        for (const auto& [key, site] : worker->take_sites()) record.sites[key].add(site);
        give_back(std::move(worker));
    }
    record.findings.drop_what_races_explain();
    record.blocks_run = launch.blocks_done;
}

}  // namespace emulator

using namespace emulator;

void emulator_launch(const void* kernel, void (*thread)(void*), void* argument, const unsigned grid[3],
                     const unsigned block[3], size_t dynamic_shared_bytes, bool instrumented) {
    std::lock_guard<std::mutex> launching(process.launching);
    const auto start = std::chrono::steady_clock::now();
    Launch launch;
    launch.thread = thread;
    launch.argument = argument;
    std::copy_n(grid, 3, launch.grid);
    std::copy_n(block, 3, launch.block);
    launch.dynamic_bytes = dynamic_shared_bytes;
    launch.instrumented = instrumented;
    launch.module = Module::containing(kernel);
    launch.blocks = uint64_t(grid[0]) * grid[1] * grid[2];

    LaunchRecord record;
    record.module = launch.module.path;
    record.kernel = reinterpret_cast<uintptr_t>(kernel) - launch.module.base;
    record.instrumented = instrumented;
    std::copy_n(grid, 3, record.grid);
    std::copy_n(block, 3, record.block);
    record.shared_bytes = launch.module.tls_bytes + dynamic_shared_bytes;
    record.blocks_total = launch.blocks;

    const size_t limit = process.shared_limit != 0 ? std::min(process.shared_limit, kMaxSharedBytes) : kMaxSharedBytes;
    const std::string refused = refusal(launch);
    if (!refused.empty()) {
        record.findings.occurred(Kind::invalid_launch)->detail = refused;
    } else if (dynamic_shared_bytes > limit) {
        record.findings.occurred(Kind::shared_memory_budget)->detail =
            "a block asks for " + std::to_string(dynamic_shared_bytes) + " bytes of shared memory; " +
            std::to_string(limit) + " is the most that it may have";
    } else {
        launch.threads = static_cast<int>(block[0] * block[1] * block[2]);
        launch.first_block_id = process.next_block_id;
        process.next_block_id += static_cast<uint32_t>(launch.blocks);
        try {
            if (instrumented) prepare_global_memory();
            run(launch, record);
        } catch (const std::bad_alloc&) {
            record.findings.occurred(Kind::invalid_launch)->detail =
                "this process has no room for a record of who accesses which part of global memory: the launch was not "
                "made";
        }
    }
    record.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::lock_guard<std::mutex> lock(process.mutex);
    process.launches.push_back(std::move(record));
}

void emulator_configure(int threads, size_t shared_limit_bytes, int (*tick)(uint64_t, uint64_t)) {
    std::lock_guard<std::mutex> lock(process.mutex);
    process.threads = threads;
    process.shared_limit = shared_limit_bytes;
    process.tick = tick;
}

const char* emulator_report() {
    std::lock_guard<std::mutex> lock(process.mutex);
    process.json = to_json(process.launches);
    return process.json.c_str();
}

void emulator_clear_report() {
    std::lock_guard<std::mutex> lock(process.mutex);
    process.launches.clear();
}
