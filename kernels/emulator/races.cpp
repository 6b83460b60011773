#include "emulator/races.h"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>

namespace emulator {

static uint32_t bit(int lane) { return uint32_t(1) << lane; }

// ---- order

void Races::start_launch() {
    const SharedMemory& shared = worker_.shared();
    cell_shift_ = 2;
    static_cells_ = (shared.static_bytes + 3) >> 2;
    cells_ = static_cells_ + ((shared.dynamic_bytes + 3) >> 2);
    time_ = 0;
    warps_.assign(static_cast<size_t>(worker_.launch().threads + kWarpSize - 1) / kWarpSize, WarpClocks());
    writes_.assign(cells_, WriteRecord());
    reads_.assign(cells_ * warps_.size(), ReadRecord());
}

void Races::start_block() {
    block_id_ = worker_.block_id();
    known_blocks_.clear();
    fence_clock_ = 0;
    order_block();
    block_clock_ = time_;
}

void Races::end_block() {
    // A read of what was not written yet, then a racing write: that is one mistake, and it has been reported.
    for (const UnwrittenRead& read : unwritten_) {
        if (raced_.count(read.cell)) continue;
        Finding* finding = worker_.occurred(Kind::uninitialized, read.pc);
        if (finding == nullptr) continue;
        finding->space = "shared";
        finding->threads = {read.thread};
        finding->offset = offset(read.cell);
        finding->bytes = read.bytes;
        finding->detail = "reads shared memory that no thread of the block has written";
    }
    unwritten_.clear();
    raced_.clear();
    more_reads_.clear();
    // Copies that nobody waited for must not look in flight to the next block.
    for (const Thread& thread : worker_.threads())
        for (const AsyncCopy& copy : thread.copies) {
            const Cells cells = cells_of(reinterpret_cast<uintptr_t>(copy.shared), copy.bytes);
            for (size_t cell = cells.first; cell < cells.first + cells.count; ++cell) writes_[cell].clock = 0;
        }
}

void Races::order_block() {
    barrier_clock_ = ++time_;
    for (WarpClocks& warp : warps_) std::fill_n(warp.clock, kWarpSize, time_);
    more_reads_.clear();
}

void Races::order_warp(const Warp& warp, uint32_t lanes) {
    WarpClocks& clocks = warps_[static_cast<size_t>(warp.number)];
    ++time_;
    if ((warp.exists & ~lanes) == 0) {
        clocks.all = time_;
        std::fill_n(clocks.clock, kWarpSize, time_);
        return;
    }
    uint32_t together[kWarpSize] = {};  // what one of them knows, all of them know now
    for (int lane = 0; lane < kWarpSize; ++lane)
        if (lanes & bit(lane))
            for (int other = 0; other < kWarpSize; ++other)
                together[other] = std::max(together[other], clocks.known[lane][other]);
    for (int lane = 0; lane < kWarpSize; ++lane) {
        if (!(lanes & bit(lane))) continue;
        together[lane] = clocks.clock[lane] = time_;
    }
    for (int lane = 0; lane < kWarpSize; ++lane)
        if (lanes & bit(lane)) std::copy_n(together, kWarpSize, clocks.known[lane]);
}

void Races::publish(int warp, PublishedClocks& barrier) {
    WarpClocks& clocks = warps_[static_cast<size_t>(warp)];
    std::fill_n(clocks.clock, kWarpSize, ++time_);
    for (int other = 0; other < kMaxWarps; ++other)
        barrier.warps[other] = std::max(barrier.warps[other], clocks.known_warps[other]);
    barrier.warps[warp] = time_;
}

void Races::learn(int warp, const PublishedClocks& barrier) {
    WarpClocks& clocks = warps_[static_cast<size_t>(warp)];
    for (int other = 0; other < kMaxWarps; ++other)
        clocks.known_warps[other] = std::max(clocks.known_warps[other], barrier.warps[other]);
    clocks.all = std::max(clocks.all,
                          barrier.warps[warp]);  // a barrier orders a warp's own lanes, too
}

bool Races::knows(int thread, int other, uint32_t clock) const {
    if (clock < barrier_clock_ || thread == other) return true;
    const WarpClocks& mine = warps_[static_cast<size_t>(thread / kWarpSize)];
    if (thread / kWarpSize != other / kWarpSize) return clock < mine.known_warps[other / kWarpSize];
    return clock < mine.all || clock < mine.known[thread % kWarpSize][other % kWarpSize];
}

bool Races::knows_lanes(int thread, int warp, uint32_t lanes, uint32_t clock) const {
    if (clock < barrier_clock_) return true;
    for (; lanes != 0; lanes &= lanes - 1)
        if (!knows(thread, warp * kWarpSize + __builtin_ctz(lanes), clock)) return false;
    return true;
}

// ---- shared memory

Races::Cells Races::cells_of(uint64_t address, unsigned bytes) {
    if (bytes < 1u << cell_shift_) refine(bytes == 2 ? 1 : 0);
    const SharedMemory& shared = worker_.shared();
    const uint64_t in_static = address - reinterpret_cast<uintptr_t>(shared.static_begin);
    const size_t first =
        in_static < shared.static_bytes
            ? in_static >> cell_shift_
            : static_cells_ + ((address - reinterpret_cast<uintptr_t>(shared.dynamic_begin)) >> cell_shift_);
    return {first, bytes >> cell_shift_};
}

uint64_t Races::offset(size_t cell) const {
    return (cell < static_cells_ ? cell : cell - static_cells_) << cell_shift_;
}

/// Splits every cell into smaller ones, each with the whole one's history.
void Races::refine(unsigned shift) {
    const size_t pieces = size_t(1) << (cell_shift_ - shift);
    auto split = [pieces](auto& records) {
        auto whole = records;
        records.clear();
        records.reserve(whole.size() * pieces);
        for (const auto& record : whole) records.insert(records.end(), pieces, record);
    };
    split(writes_);
    split(reads_);
    decltype(more_reads_) finer;
    for (const auto& [index, records] : more_reads_)
        for (size_t i = 0; i < pieces; ++i) finer[index * pieces + i] = records;
    more_reads_.swap(finer);
    for (UnwrittenRead& read : unwritten_) read.cell *= pieces;
    std::unordered_set<size_t> finer_raced;
    for (size_t cell : raced_)
        for (size_t i = 0; i < pieces; ++i) finer_raced.insert(cell * pieces + i);
    raced_.swap(finer_raced);
    cells_ *= pieces;
    static_cells_ *= pieces;
    cell_shift_ = shift;
}

void Races::check_last_write(size_t cell, int thread, const Request& request, bool will_write) {
    const WriteRecord& last = writes_[cell];
    if (last.clock == kInFlight) {
        if (will_write && last.thread != thread)
            shared_finding(Kind::race, cell, last.thread, last.pc, thread, request,
                           "writes where another thread's cp.async is still in flight");
        else
            shared_finding(Kind::missing_wait, cell, last.thread, last.pc, thread, request,
                           will_write ? "writes where a cp.async is still in flight"
                                      : "reads what a cp.async that nobody has waited for will write");
        return;
    }
    if (last.clock < block_clock_ || last.atomic) return;
    if (!knows(thread, last.thread, last.clock))
        shared_finding(Kind::race, cell, last.thread, last.pc, thread, request,
                       will_write ? "both write, in no order" : "one reads what the other writes, in no order");
}

void Races::check_reads(size_t cell, int thread, const Request& request) {
    auto check = [&](int warp, const ReadRecord& record) {
        if (record.clock < barrier_clock_) return;
        for (uint32_t lanes = record.lanes; lanes != 0; lanes &= lanes - 1) {
            const int reader = warp * kWarpSize + __builtin_ctz(lanes);
            if (knows(thread, reader, record.clock)) continue;
            if (writes_[cell].clock < block_clock_) raced_.insert(cell);
            return shared_finding(Kind::race, cell, reader, record.pc, thread, request,
                                  "one writes what the other reads, in no order");
        }
    };
    for (size_t warp = 0; warp < warps_.size(); ++warp) {
        const size_t index = warp * cells_ + cell;
        check(static_cast<int>(warp), reads_[index]);
        if (more_reads_.empty()) continue;
        const auto more = more_reads_.find(index);
        if (more == more_reads_.end()) continue;
        for (const ReadRecord& record : more->second) check(static_cast<int>(warp), record);
    }
}

void Races::read_cell(size_t cell, int thread, uint32_t readers, const Request& request) {
    const uint32_t written = writes_[cell].clock;
    if (written < block_clock_) {
        if (unwritten_.size() < 65536) unwritten_.push_back({cell, request.pc, thread, request.bytes});
    } else if (written >= barrier_clock_) {
        check_last_write(cell, thread, request, false);
    }
    const size_t index = static_cast<size_t>(request.warp) * cells_ + cell;
    ReadRecord& record = reads_[index];
    const uint32_t now = clock(thread);
    if (record.clock == now) {
        record.lanes |= readers;
        return;
    }
    if (record.clock >= barrier_clock_ && !knows_lanes(thread, request.warp, record.lanes, record.clock))
        more_reads_[index].push_back(record);
    record = {now, readers, request.pc};
}

void Races::shared_read(const Request& request) {
    int lane = __builtin_ctz(request.lanes);
    const int first_thread = request.warp * kWarpSize;
    const WarpClocks& clocks = warps_[static_cast<size_t>(request.warp)];
    // One address for all, and all at one clock: a single reader that is many lanes.
    bool together = true;
    for (uint32_t rest = request.lanes; rest != 0; rest &= rest - 1) {
        const int other = __builtin_ctz(rest);
        together &= request.addresses[other] == request.addresses[lane] && clocks.clock[other] == clocks.clock[lane];
    }
    for (uint32_t rest = together ? bit(lane) : request.lanes; rest != 0; rest &= rest - 1) {
        lane = __builtin_ctz(rest);
        const Cells cells = cells_of(request.addresses[lane], request.bytes);
        const uint32_t readers = request.receivers != 0 ? request.receivers : together ? request.lanes : bit(lane);
        for (size_t cell = cells.first; cell < cells.first + cells.count; ++cell) {
            const int thread = first_thread + lane;
            // Of many readers, take one that is not the writer: the writer itself is in order.
            const bool is_writer = writes_[cell].thread == thread && (readers & (readers - 1)) != 0;
            read_cell(cell, is_writer ? first_thread + __builtin_ctz(readers & ~bit(lane)) : thread, readers, request);
        }
    }
}

void Races::write_cell(size_t cell, int thread, const Request& request, uint32_t clock) {
    if (writes_[cell].clock >= barrier_clock_) check_last_write(cell, thread, request, true);
    check_reads(cell, thread, request);
    writes_[cell] = {clock, request.pc, static_cast<uint16_t>(thread), false};
}

void Races::shared_write(const Request& request) {
    for (uint32_t rest = request.lanes; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest), thread = request.warp * kWarpSize + lane;
        const Cells cells = cells_of(request.addresses[lane], request.bytes);
        for (size_t cell = cells.first; cell < cells.first + cells.count; ++cell)
            write_cell(cell, thread, request, clock(thread));
    }
}

void Races::shared_atomic(const Request& request) {
    // Atomics race with nothing; they do make what they touch written.
    for (uint32_t rest = request.lanes; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest), thread = request.warp * kWarpSize + lane;
        const Cells cells = cells_of(request.addresses[lane], request.bytes);
        for (size_t cell = cells.first; cell < cells.first + cells.count; ++cell) {
            if (writes_[cell].clock < block_clock_ && unwritten_.size() < 65536)
                unwritten_.push_back({cell, request.pc, thread, request.bytes});
            writes_[cell] = {clock(thread), request.pc, static_cast<uint16_t>(thread), true};
        }
    }
}

void Races::copy_issued(const Request& request) {
    for (uint32_t rest = request.lanes; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest), thread = request.warp * kWarpSize + lane;
        const Cells cells = cells_of(request.addresses[lane], request.bytes);
        for (size_t cell = cells.first; cell < cells.first + cells.count; ++cell)
            write_cell(cell, thread, request, kInFlight);
    }
}

void Races::copy_landed(const Request& request) {
    // From here on it is as if the thread that waited had written itself.
    for (uint32_t rest = request.lanes; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest), thread = request.warp * kWarpSize + lane;
        const Cells cells = cells_of(request.addresses[lane], request.bytes);
        for (size_t cell = cells.first; cell < cells.first + cells.count; ++cell)
            writes_[cell] = {clock(thread), request.pc, static_cast<uint16_t>(thread), false};
    }
}

void Races::shared_finding(Kind kind, size_t cell, int earlier, uint32_t earlier_pc, int thread, const Request& request,
                           const char* detail) {
    Finding* finding = worker_.occurred(kind, earlier_pc, request.pc);
    if (finding == nullptr) return;
    finding->space = "shared";
    finding->threads = {earlier, thread};
    finding->offset = offset(cell);
    finding->bytes = request.bytes;
    finding->detail = detail;
}

// ---- global memory

/// What is known of 4 bytes of a buffer. Blocks run side by side, so unlike shared memory's records these say which
/// block. `bytes` has a bit for each of the four: halves of a word that different threads write do not race.
struct GlobalRecord {
    uint32_t block;
    uint32_t clock;
    uint32_t pc;
    uint32_t lanes;  // of one warp; a write's has one
    uint16_t warp;
    uint8_t bytes;
};

struct GlobalCell {
    GlobalRecord write;
    GlobalRecord reads[2];  // the first of those that may still matter, and the
                            // last: enough to see most races
};

class GlobalShadow {
  public:
    /// Null if there is not enough address space for it: then races in this buffer go unseen.
    static std::shared_ptr<GlobalShadow> of(const Buffer& buffer) {
        const uintptr_t begin = buffer.begin & ~uintptr_t(3);
        const size_t size = (buffer.end() - begin + 3) / 4 * sizeof(GlobalCell);
        void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return nullptr;
        return std::make_shared<GlobalShadow>(begin, static_cast<GlobalCell*>(memory), size);
    }
    GlobalShadow(uintptr_t begin, GlobalCell* cells, size_t size) : begin_(begin), size_(size), cells_(cells) {}
    GlobalShadow(const GlobalShadow&) = delete;
    ~GlobalShadow() { munmap(cells_, size_); }

    /// Calls visit(cell, lane, bytes) for the cells of every lane, each while no other worker sees it.
    template <class Visit>
    void visit(const Request& request, Visit visit) {
        std::unique_lock<std::mutex> lock;
        size_t locked = SIZE_MAX;
        for (uint32_t rest = request.lanes; rest != 0; rest &= rest - 1) {
            const int lane = __builtin_ctz(rest);
            const uint64_t address = request.addresses[lane];
            const unsigned bytes = request.bytes < 4 ? ((1u << request.bytes) - 1) << (address & 3) : 0xf;
            const size_t first = (address - begin_) / 4, count = std::max(1u, request.bytes / 4);
            for (size_t cell = first; cell < first + count; ++cell) {
                const size_t stripe = cell / 1024;
                if (stripe != locked) {
                    if (lock.owns_lock()) lock.unlock();
                    lock = std::unique_lock<std::mutex>(mutexes_[stripe % kMutexes]);
                    locked = stripe;
                }
                visit(cells_[cell], lane, static_cast<uint8_t>(bytes));
            }
        }
    }

  private:
    static constexpr size_t kMutexes = 64;

    uintptr_t begin_;
    size_t size_;
    GlobalCell* cells_;
    std::mutex mutexes_[kMutexes];
};

/// Whether this block's `thread` knows what thread `other` of `block` did at `clock`.
bool Races::knows_block(uint32_t block, int thread, int other, uint32_t clock) const {
    if (block < worker_.launch().first_block_id) return true;  // an earlier launch
    if (block == block_id_) return knows(thread, other, clock);
    const auto known = known_blocks_.find(block);
    return known != known_blocks_.end() && clock < known->second;
}

void Races::global_read(const Buffer& buffer, const Request& request) {
    buffer.shadow->visit(request, [&](GlobalCell& cell, int lane, uint8_t bytes) {
        const int thread = request.warp * kWarpSize + lane;
        const GlobalRecord& write = cell.write;
        if (write.bytes & bytes) {
            const int writer = write.warp * kWarpSize + __builtin_ctz(write.lanes);
            if (!knows_block(write.block, thread, writer, write.clock))
                global_finding(buffer, request.addresses[lane], write.block, writer, write.pc, thread, request,
                               "one reads what the other writes, in no order");
        }
        const uint32_t now = clock(thread);
        const uint16_t warp = static_cast<uint16_t>(request.warp);
        GlobalRecord* place = &cell.reads[1];
        for (GlobalRecord& read : cell.reads) {
            if (read.block == block_id_ && read.warp == warp && read.clock == now) {
                read.lanes |= bit(lane);
                read.bytes |= bytes;
                return;
            }
        }
        for (GlobalRecord& read : cell.reads) {
            const bool over = read.block < worker_.launch().first_block_id ||
                              (read.block == block_id_ && knows_lanes(thread, read.warp, read.lanes, read.clock));
            if (over) place = &read;
        }
        *place = {block_id_, now, request.pc, bit(lane), warp, bytes};
    });
}

void Races::global_write(const Buffer& buffer, const Request& request) {
    buffer.shadow->visit(request, [&](GlobalCell& cell, int lane, uint8_t bytes) {
        const int thread = request.warp * kWarpSize + lane;
        auto check = [&](const GlobalRecord& record, const char* detail) {
            if ((record.bytes & bytes) == 0) return;
            for (uint32_t lanes = record.lanes; lanes != 0; lanes &= lanes - 1) {
                const int other = record.warp * kWarpSize + __builtin_ctz(lanes);
                if (knows_block(record.block, thread, other, record.clock)) continue;
                return global_finding(buffer, request.addresses[lane], record.block, other, record.pc, thread, request,
                                      detail);
            }
        };
        check(cell.write, "both write, in no order");
        for (const GlobalRecord& read : cell.reads) check(read, "one writes what the other reads, in no order");
        const uint32_t now = clock(thread);
        const uint16_t warp = static_cast<uint16_t>(request.warp);
        GlobalRecord& write = cell.write;
        const bool same =
            write.block == block_id_ && write.clock == now && write.warp == warp && write.lanes == bit(lane);
        write = {block_id_, now, request.pc, bit(lane), warp, static_cast<uint8_t>(same ? write.bytes | bytes : bytes)};
    });
}

void Races::global_finding(const Buffer& buffer, uint64_t address, uint32_t earlier_block, int earlier,
                           uint32_t earlier_pc, int thread, const Request& request, const char* detail) {
    Finding* finding = worker_.occurred(Kind::race, earlier_pc, request.pc);
    if (finding == nullptr) return;
    finding->space = "global";
    finding->threads = {earlier, thread};
    finding->offset = address - buffer.begin;
    finding->buffer = buffer.name;
    finding->bytes = request.bytes;
    finding->detail = detail;
    if (earlier_block == block_id_) return;
    const uint64_t number = earlier_block - worker_.launch().first_block_id;
    const unsigned* grid = worker_.launch().grid;
    finding->detail += "; the first thread is in block (" + std::to_string(number % grid[0]) + ", " +
                       std::to_string(number / grid[0] % grid[1]) + ", " + std::to_string(number / grid[0] / grid[1]) +
                       ")";
}

// ---- order between blocks

static struct {
    std::mutex mutex;
    std::unordered_map<uint64_t, std::unordered_map<uint32_t, uint32_t>> at;  // atomic's address -> block id -> clock
} published;

void prepare_global_memory() {
    published.at.clear();
    for (Buffer& buffer : buffers())
        if (buffer.writable && buffer.shadow == nullptr) buffer.shadow = GlobalShadow::of(buffer);
}

void Races::fence(int warp, uint32_t lanes) {
    fence_clock_ = ++time_;
    for (; lanes != 0; lanes &= lanes - 1) warps_[static_cast<size_t>(warp)].clock[__builtin_ctz(lanes)] = time_;
}

void Races::global_atomic(uint64_t address) {
    std::lock_guard<std::mutex> lock(published.mutex);
    auto& blocks = published.at[address];
    if (fence_clock_ != 0) known_blocks_[block_id_] = fence_clock_;
    for (const auto& [block, clock] : known_blocks_) blocks[block] = std::max(blocks[block], clock);
    for (const auto& [block, clock] : blocks) known_blocks_[block] = std::max(known_blocks_[block], clock);
}

}  // namespace emulator
