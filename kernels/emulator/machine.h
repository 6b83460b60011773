// The emulated machine: a launch, and the workers that run its blocks one at a time, each on an OS thread of its own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "emulator/fiber.h"
#include "emulator/lanes.h"
#include "emulator/memory.h"
#include "emulator/report.h"

namespace emulator {

constexpr int kMaxThreads = 1024;  // a block
constexpr int kMaxWarps = kMaxThreads / kWarpSize;
constexpr int kBarriers = 16;
constexpr size_t kMaxSharedBytes = 227 * 1024;  // a block, on the largest GPU emulated

/// Coordinates in a grid or block from a number that counts x fastest.
inline void coordinates(uint64_t number, const unsigned (&size)[3], unsigned (&result)[3]) {
    result[0] = static_cast<unsigned>(number % size[0]);
    result[1] = static_cast<unsigned>(number / size[0] % size[1]);
    result[2] = static_cast<unsigned>(number / size[0] / size[1]);
}

class Trace;
struct Collective;
struct Warp;

/// Does a collective's work for the lanes that have arrived. Their operands are warp.operands[lane]; results go there,
/// too.
using Perform = void (*)(Warp& warp, const Collective& collective);

/// The mask of a collective for whoever is there: it is performed when no lane of the warp can go on without it.
constexpr uint32_t kWhoeverIsThere = 0;

/// An instruction that the lanes in `mask` execute together. The last of them to arrive performs it for all.
struct Collective {
    Op op;
    uint32_t mask;
    uint32_t pc;
    Perform perform;
    unsigned instructions = 1;  // what it costs on the GPU: an 8-byte shuffle is two
    unsigned bytes = 0;         // per lane, for the report
    uint32_t arrived = 0;
};

/// A cp.async that has been issued; it has not landed yet.
struct AsyncCopy {
    char* shared;
    const char* global;
    uint8_t bytes, source_bytes;
    uint32_t pc;
};

struct Thread {
    Context context;
    int number;         // in the block, x fastest
    unsigned index[3];  // threadIdx
    // Where it waits, when it waits.
    Op wait_op;
    uint32_t wait_pc;
    // Its cp.asyncs that have not landed, oldest first: groups[0] of them are the oldest group, groups[1] the next one
    // ...; those beyond the first `committed` belong to no group yet.
    std::vector<AsyncCopy> copies;
    std::vector<int> groups;
    int committed;
};

struct Warp {
    int number;
    uint32_t exists;               // lanes that the block has: the last warp may lack some
    uint32_t alive;                // lanes that have not returned
    uint32_t ready;                // lanes that can run
    uint32_t full;                 // lanes that wait for room in their log (instrumented launches)
    void* operands[kWarpSize];     // of each lane's collective, on the lane's own stack
    std::vector<Collective> open;  // collectives for which lanes wait
};

/// What is published at a named barrier: of every warp, the time before which all it did is ordered (races.h).
struct PublishedClocks {
    uint32_t warps[kMaxWarps] = {};
};

/// __syncthreads: every live thread is expected.
struct BlockBarrier {
    unsigned arrived = 0;              // threads
    uint32_t waiting[kMaxWarps] = {};  // lanes
    // Where the first to arrive stands.
    const char* file = nullptr;
    int line = 0;
    uint32_t pc = 0;
    int thread = 0;
};

/// bar.sync and bar.arrive count whole warps, as the PTX manual has it.
struct NamedBarrier {
    unsigned arrived = 0;              // threads
    unsigned generation = 0;           // how often it has been passed
    uint32_t waiting[kMaxWarps] = {};  // lanes
    uint32_t waiting_warps = 0;        // warps that wait, or are about to
    PublishedClocks published;         // what they will know
};

/// The shared library that a kernel is in.
struct Module {
    std::string path;
    uintptr_t base = 0;            // where its addresses count from
    uintptr_t begin = 0, end = 0;  // its image in memory
    size_t tls_id = 0;             // of its thread-local segment, the static shared memory; 0 = it has none
    size_t tls_bytes = 0;

    bool contains(uintptr_t address) const { return address >= begin && address < end; }
    static Module containing(const void* address);
    /// The calling OS thread's copy of the static shared memory.
    char* static_shared() const;
};

struct Launch {
    void (*thread)(void*);
    void* argument;
    unsigned grid[3], block[3];
    size_t dynamic_bytes;
    bool instrumented;
    Module module;
    int threads = 0;              // in a block
    uint64_t blocks = 0;          // in the grid
    uint32_t first_block_id = 0;  // blocks are numbered through all launches
    std::atomic<uint64_t> next_block{0}, blocks_done{0};
    alignas(64) std::atomic<bool> stop{false};  // set by a fatal finding or by cancelling; read often
};

/// Runs blocks, one after another, on the OS thread that calls run(). A block's threads are fibers; they take turns:
/// one runs until it has to wait for others. Kept between launches for its stacks.
class Worker {
  public:
    Worker();
    ~Worker();

    /// Runs blocks of the launch until there are none left or it is stopped.
    void run(Launch& launch);

    // For the calls that kernel code makes, on the fiber of the running thread:

    Thread& running() { return *running_; }
    Warp& warp() { return warps_[running_->number / kWarpSize]; }
    int lane() const { return running_->number % kWarpSize; }
    /// A return address as reports give it.
    uint32_t pc(const void* return_address) const {
        return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(return_address) - launch_->module.base);
    }
    /// Takes part in a warp collective; returns when it has been performed. `operands` outlives the call.
    void collective(const Collective& collective, void* operands);
    void block_barrier(const char* file, int line, uint32_t pc);
    void named_barrier(int id, unsigned threads, bool wait, uint32_t pc);
    /// Waits until the logs of the running thread's warp have been drained.
    void wait_for_drain();
    /// Records a fatal finding's block as lost and leaves it; the launch stops. The fiber is never resumed.
    [[noreturn]] void abandon();
    /// The running thread has got a signal. Called from the signal's handler. `kernel_address` is where the kernel
    /// stood, one past the instruction; 0 if that is not known.
    [[noreturn]] void crash(int signal, const void* address, uintptr_t kernel_address);

    const Launch& launch() const { return *launch_; }
    const unsigned* block() const { return block_; }
    uint32_t block_id() const { return block_id_; }
    std::vector<Warp>& warps() { return warps_; }
    const std::vector<Thread>& threads() const { return threads_; }
    bool on_a_fiber() const { return on_a_fiber_; }
    bool on_a_stack(uintptr_t address) const { return stacks_.contains(reinterpret_cast<void*>(address)); }
    /// The buffer that an instruction has accessed last, perhaps: it mostly is the one that it accesses next.
    const Buffer*& recent_buffer(uint32_t pc) { return recent_buffers_[(pc ^ pc >> 6) % 64]; }
    /// Null in a launch that is not instrumented.
    Trace* trace() { return trace_; }
    Sites take_sites();
    const SharedMemory& shared() const { return shared_; }
    Findings& findings() { return findings_; }
    /// A first occurrence to describe, with the running block filled in; null if it has been described.
    Finding* occurred(Kind kind, uint32_t first_pc = 0, uint32_t second_pc = 0);

  private:
    static void thread_main();
    void run_block(uint64_t block);
    void start_threads();
    void finish_thread();
    /// The running thread waits: others run, and this returns when something has made it ready.
    void suspend();
    /// Picks the next thread that can run; null if none can, or if the launch has been stopped.
    Thread* next_ready();
    Context& resume(Thread* thread);
    void complete(Warp& warp, size_t open_index);
    void complete_if_arrived(Warp& warp);
    bool complete_whoever_is_there(Warp& warp);
    void arrive(Warp& warp, int id, unsigned threads, bool wait);
    void release_block_barrier();
    void wake(const uint32_t (&lanes)[kMaxWarps]);
    void stop_if_cancelled();
    void make_ready(Warp& warp, uint32_t lanes);
    void report_deadlock();
    void report_crash();

    Launch* launch_ = nullptr;
    unsigned block_[3] = {0, 0, 0};
    uint32_t block_id_ = 0;
    SharedMemory shared_;
    std::vector<Thread> threads_;
    std::vector<Warp> warps_;
    BlockBarrier block_barrier_;
    NamedBarrier named_barriers_[kBarriers];
    uint32_t ready_warps_ = 0;
    unsigned finished_ = 0;  // threads that have returned
    int current_warp_ = 0;
    Thread* running_ = nullptr;
    Context main_;  // run_block, which the block's threads go back to
    bool on_a_fiber_ = false;
    bool abandoned_ = false;
    struct {
        int signal = 0;  // 0: no crash
        const void* address;
        uintptr_t kernel_address;
    } crash_;
    Stacks stacks_;
    const Buffer* recent_buffers_[64];
    Findings findings_;
    std::unique_ptr<Trace> kept_trace_;
    Trace* trace_ = nullptr;
};

/// The worker whose block the calling OS thread runs; null on every other thread.
extern thread_local Worker* current_worker __attribute__((tls_model("initial-exec"), visibility("hidden")));

/// What check() finds for most accesses, found sooner.
inline Place check(Worker& worker, const Access& access) {
    if ((access.address & (access.bytes - 1)) == 0) {
        const size_t offset = worker.shared().offset(access.address, access.bytes);
        if (offset != SharedMemory::kOutside) return {Space::shared, offset};
        const Buffer* buffer = worker.recent_buffer(access.pc);
        if (buffer != nullptr && buffer->allows(access)) return {Space::global, access.address};
    }
    return check(worker, access, access.bytes);
}

}  // namespace emulator
