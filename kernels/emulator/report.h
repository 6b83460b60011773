// What a launch leaves behind: counters for every instruction, findings, and their JSON.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace emulator {

/// Kinds of warp-level instructions that are counted.
enum class Op : uint8_t {
    global_load,
    global_store,
    shared_load,
    shared_store,
    ldmatrix,
    stmatrix,
    cp_async,
    atomic,
    shuffle,
    vote,
    match,
    reduce,
    mma,
    barrier,
    syncwarp,
    fence
};
const char* name(Op op);

/// What the instruction at one address did, summed over every time that a warp executed it.
struct Site {
    uint64_t requests = 0;    // warp-level instructions
    uint64_t lanes = 0;       // lanes active in them
    uint64_t sectors = 0;     // 32-byte pieces of global memory touched
    uint64_t reads = 0;       // of cp.async: instructions that read memory, where others only fill with zeros
    uint64_t read_bytes = 0;  // and what their lanes read
    uint64_t wavefronts = 0;  // passes through the shared-memory banks
    uint64_t ideal = 0;       // passes that the same instructions need without bank conflicts
    unsigned bytes = 0;       // per lane

    void add(const Site& other);
};
using Sites = std::map<std::pair<uint32_t, Op>, Site>;  // by (pc, op)

enum class Kind : uint8_t {
    race,
    uninitialized,
    out_of_bounds,
    write_to_input,
    misaligned,
    missing_wait,
    divergent_barrier,
    warp_mask,
    deadlock,
    crash,
    shared_memory_budget,
    invalid_launch,
    cancelled
};
const char* name(Kind kind);

/// Something wrong, at one pair of instructions; `count` says how often, the other fields describe one occurrence.
struct Finding {
    Kind kind;
    const char* space = "";  // "shared" or "global" for a finding on memory
    unsigned block[3] = {0, 0, 0};
    std::vector<int> threads;   // numbers in the block, x fastest
    std::vector<uint32_t> pcs;  // return addresses relative to the module, of the
                                // accesses or of the waiting calls
    uint64_t offset = 0;        // bytes from the start of the shared memory or of the buffer
    std::string buffer;         // a declared buffer's name
    unsigned bytes = 0;         // of the access
    uint64_t count = 0;
    std::string detail;
};

/// Findings by what they have in common, so that a race that happens a million times is one finding.
class Findings {
  public:
    /// Counts one occurrence. Returns the finding to fill in if it is the first of its kind there, else null.
    Finding* occurred(Kind kind, uint32_t first_pc = 0, uint32_t second_pc = 0);
    /// Adds another worker's; of two descriptions of one finding, that of the lower block stays.
    void merge(const Findings& other);
    /// Drops reads of unwritten memory by instructions that race: the write came too late, which is one mistake, not
    /// two.
    void drop_what_races_explain();
    const auto& all() const { return findings_; }

  private:
    std::map<std::tuple<Kind, uint32_t, uint32_t>, Finding> findings_;
};

struct LaunchRecord {
    std::string module;
    uint64_t kernel = 0;  // address relative to the module
    bool instrumented = false;
    unsigned grid[3], block[3];
    size_t shared_bytes = 0;
    uint64_t blocks_total = 0, blocks_run = 0;
    double seconds = 0;
    Sites sites;
    Findings findings;
};

std::string to_json(const std::vector<LaunchRecord>& launches);

}  // namespace emulator
