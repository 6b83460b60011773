// Data races. Two accesses to one byte, at least one of them a write, race unless something orders them: a barrier, a
// __syncwarp of both lanes, a named barrier, waiting for one's own cp.async; between blocks, fenced atomics. What
// merely happened to run first counts for nothing.
//
// Time is one counter of a worker that every ordering event advances. A thread's clock is the time of the last such
// event that it took part in, and an access carries its thread's clock. So everything before the event at time t has a
// clock below t, and "thread u knows what thread v did until t" is enough to tell what is ordered.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "emulator/machine.h"
#include "emulator/memory.h"

namespace emulator {

/// One warp-level access: lane l of `lanes` touches `bytes` at addresses[l], in shared memory an offset.
struct Request {
    int warp;
    uint32_t lanes;
    unsigned bytes;
    uint32_t pc;
    const uint64_t* addresses;
    uint32_t receivers = 0;  // ldmatrix: the lanes that get what is read, each a part of every row
};

class Races {
  public:
    explicit Races(Worker& worker) : worker_(worker) {}

    void start_launch();
    void start_block();

    // Order. What was accessed before must have been passed on before the call.

    void order_block();
    void order_warp(const Warp& warp, uint32_t lanes);
    /// A warp comes to a named barrier: what it did and knows is published there.
    void publish(int warp, PublishedClocks& barrier);
    /// The barrier is complete: a warp that waited knows what was published.
    void learn(int warp, const PublishedClocks& barrier);
    void fence(int warp, uint32_t lanes);
    /// An atomic on global memory publishes what was fenced, and learns what earlier ones published.
    void global_atomic(uint64_t address);

    // Accesses.

    void shared_read(const Request& request);
    void shared_write(const Request& request);
    void shared_atomic(const Request& request);
    void copy_issued(const Request& request);
    void copy_landed(const Request& request);
    void global_access(const Buffer& buffer, const Request& request, bool write);

  private:
    struct WarpClocks {
        uint32_t clock[kWarpSize] = {};
        uint32_t all = 0;                           // the last __syncwarp of every lane
        uint32_t known[kWarpSize][kWarpSize] = {};  // by partial __syncwarps: [lane][other lane]
        uint32_t known_warps[kMaxWarps] = {};       // by named barriers
    };
    /// The last write to a cell of shared memory.
    struct Write {
        uint32_t clock = 0;
        uint32_t pc = 0;
        uint16_t thread = 0;
        bool atomic = false;
        bool in_flight = false;  // a cp.async that nobody has waited for
    };
    /// The last reads of a cell by the lanes of one warp.
    struct Read {
        uint32_t clock = 0;
        uint32_t lanes = 0;
        uint32_t pc = 0;
    };

    uint32_t clock(int thread) const { return warps_[thread / kWarpSize].clock[thread % kWarpSize]; }
    /// Whether `thread` knows what `other` did at `clock`.
    bool knows(int thread, int other, uint32_t clock) const;
    bool knows(int thread, uint32_t block, int other, uint32_t clock) const;
    template <class Visit>
    void for_each_cell(const Request& request, uint32_t lanes, Visit visit);
    void fit_cells(unsigned bytes);
    void check_written(size_t cell, int thread, const Request& request);
    bool check_last_write(size_t cell, int thread, const Request& request, bool will_write);
    void check_reads(size_t cell, int thread, const Request& request);
    void write_cell(size_t cell, int thread, const Request& request, bool in_flight);
    Finding* shared_finding(Kind kind, size_t cell, const Request& request, uint32_t earlier_pc);

    Worker& worker_;
    uint32_t time_ = 0;
    uint32_t block_clock_ = 0;    // when the block started: what is older was another block's
    uint32_t barrier_clock_ = 0;  // the last __syncthreads: what is older is known to everyone
    uint32_t fence_clock_ = 0;    // the last __threadfence
    std::vector<WarpClocks> warps_;

    // Shared memory in cells of 4 bytes, or of 2 or 1 once something narrower has been accessed. Clocks never repeat,
    // so nothing is cleared from one block to the next.
    unsigned cell_shift_ = 2;
    size_t cells_ = 0;
    std::vector<Write> writes_;  // [cell]
    std::vector<Read> reads_;    // [warp][cell]

    uint32_t block_id_ = 0;                                // of this block, among all blocks of all launches
    std::unordered_map<uint32_t, uint32_t> known_blocks_;  // by fenced atomics: block id -> clock
};

/// Before an instrumented launch: everything earlier is in order, and every writable buffer has a shadow, a record of
/// who touched which part. Throws std::bad_alloc if there is no address space for one.
void prepare_global_memory();

}  // namespace emulator
