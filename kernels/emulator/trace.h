// What an instrumented launch adds to a worker: every memory access is noted in its thread's log and, once the other
// lanes of the warp have come as far, merged with theirs into the requests that a GPU would make. Requests are counted
// by instruction and passed on to the race detector.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "emulator/machine.h"
#include "emulator/memory.h"
#include "emulator/races.h"

namespace emulator {

class Trace {
  public:
    explicit Trace(Worker& worker) : races(worker), worker_(worker) {}

    void start_launch();
    void start_block();
    void end_block();

    /// The running thread is about to access memory, or to issue a cp.async. Does not return if a GPU would not survive
    /// it.
    void access(const Access& access);
    void copy_issued(const AsyncCopy& copy, bool bypass_l1);
    void copy_landed(const AsyncCopy& copy);

    /// Merges what `lanes` have logged, or less: if lanes of the warp wait for room in their logs, until one has some.
    void drain(Warp& warp, uint32_t lanes);

    Site& site(uint32_t pc, Op op) { return sites_[uint64_t(op) << 32 | pc]; }
    void count(const Collective& collective);
    /// ldmatrix or stmatrix, beyond count(): lanes 8m to 8m + 7 have given the rows of matrix m.
    void matrices(const Warp& warp, const Collective& collective, const uint64_t* rows, int count);
    unsigned global_sectors(const Request& request) const;
    Sites sites() const;

    Races races;

  private:
    /// The accesses of a thread since its log was last drained.
    struct Log {
        static constexpr int kEntries = 32;
        uint64_t keys[kEntries];  // what an access has in common with other lanes' accesses by the same instruction
        uint64_t addresses[kEntries];
        uint64_t targets[kEntries];  // of a cp.async: where it copies to, and how many bytes
        int size;
    };
    void log(uint64_t key, uintptr_t address, uint64_t target = 0);
    uint64_t choose(uint32_t pending, const int* position) const;
    void request(int warp, uint64_t key, uint32_t lanes, const uint64_t* addresses, const uint64_t* targets);
    void global_request(const Request& request, bool write);
    const Buffer* buffer(const Request& request, uint32_t lanes, bool write) const;
    uint64_t origin(const Request& request) const;

    Worker& worker_;
    Log logs_[kWarpSize] = {};  // of the warp that runs: it is drained before another one does
    std::unordered_map<uint64_t, Site> sites_;
};

}  // namespace emulator
