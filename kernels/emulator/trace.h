// What an instrumented launch adds to a worker: every memory access is checked before it is made, noted in its thread's
// log, and, once the other lanes of the warp have come as far, merged with theirs into the requests that a GPU would
// make. Requests are counted by instruction and passed on to the race detector.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "emulator/machine.h"
#include "emulator/memory.h"
#include "emulator/races.h"

namespace emulator {

/// Where an address is. Local arrays and constants are not counted.
enum class Place { shared, global, uncounted };

class Trace {
  public:
    explicit Trace(Worker& worker) : races(worker), worker_(worker) {}

    void start_launch();
    void start_block();
    void end_block();

    /// The running thread is about to access memory. Does not return if the access is one that a GPU would not survive.
    void access(uintptr_t address, unsigned bytes, bool write, uint32_t pc);
    /// The same for a cp.async, and for its landing.
    void copy_issued(const AsyncCopy& copy, bool bypass_l1);
    void copy_landed(const AsyncCopy& copy);
    /// The same for a lane's part of ldmatrix or stmatrix, which take shared memory only, and of an atomic.
    void check_shared(uintptr_t address, unsigned bytes, bool write, uint32_t pc);
    Place check_atomic(uintptr_t address, unsigned bytes, uint32_t pc);

    /// Merges what `lanes` have logged. A lane in warp.full waits for room in its log: merging stops when it has some.
    void drain(Warp& warp, uint32_t lanes);
    Site& site(uint32_t pc, Op op);
    void count(const Collective& collective);
    /// ldmatrix or stmatrix, beyond count(): lanes 8m to 8m + 7 have given the rows of matrix m.
    void matrices(const Warp& warp, const Collective& collective, const uint64_t* rows, int count);
    Sites& sites() { return sites_; }

    /// Sectors of a request to global memory.
    unsigned global_sectors(const Request& request);

    Races races;

  private:
    /// One row for each access of a thread since its log was last drained; the lanes of a warp side by side, because
    /// lanes that run together have their equal accesses in equal rows.
    struct Log {
        static constexpr int kRows = 64;
        uint64_t keys[kRows][kWarpSize];  // what identifies an instruction: pc, width, kind
        uint64_t addresses[kRows][kWarpSize];
        uint64_t copies[kRows][kWarpSize];  // cp.async: shared address, source bytes
        uint8_t count[kWarpSize];
    };
    Place place(uintptr_t address, unsigned bytes, bool write, uint32_t pc);
    Place place_slowly(uintptr_t address, unsigned bytes, bool write, uint32_t pc);
    [[noreturn]] void out_of_bounds(uintptr_t address, unsigned bytes, bool write, uint32_t pc);
    [[noreturn]] void misaligned(uintptr_t address, unsigned bytes, Place place, uint32_t pc);
    void check_alignment(uintptr_t address, unsigned bytes, Place place, uint32_t pc);
    void log(uint64_t key, uintptr_t address, uint64_t copy);
    uint64_t choose(const Log& log, uint32_t pending, const uint8_t* position) const;
    void request(int warp, uint64_t key, uint32_t lanes, const uint64_t* addresses, const uint64_t* copies);
    const Buffer*& likely_buffer(uint32_t pc) { return likely_buffers_[(pc ^ pc >> 6) % 64]; }
    const Buffer* buffer_of(uint64_t address, bool write, uint32_t pc);
    uint64_t origin_of(uint64_t address, uint32_t pc);
    void global_request(const Request& request, bool write);

    Worker& worker_;
    SharedMemory shared_;
    const Buffer* likely_buffers_[64];  // the one that an instruction accessed last, by a hash of its pc
    std::vector<Log> logs_;             // by warp
    Sites sites_;
    struct {
        uint32_t pc = 0;
        Op op = Op::global_load;
        Site* site = nullptr;
    } recent_sites_[256];
};

}  // namespace emulator
