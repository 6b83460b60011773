#include "emulator/races.h"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <new>

namespace emulator {

void Races::start_launch() {
    cell_shift_ = 2;
    cells_ = (worker_.shared().end_offset() + 3) >> cell_shift_;
    time_ = 0;
    warps_.assign(worker_.warps().size(), WarpClocks());
    writes_.assign(cells_, Write());
    reads_.assign(cells_ * warps_.size(), Read());
}

void Races::start_block() {
    block_id_ = worker_.block_id();
    known_blocks_.clear();
    fence_clock_ = 0;
    order_block();
    block_clock_ = time_;
}

// ---- order

void Races::order_block() {
    barrier_clock_ = ++time_;
    for (WarpClocks& warp : warps_) std::fill_n(warp.clock, kWarpSize, time_);
}

void Races::order_warp(const Warp& warp, uint32_t lanes) {
    WarpClocks& clocks = warps_[static_cast<size_t>(warp.number)];
    ++time_;
    for (int lane : each(lanes)) clocks.clock[lane] = time_;
    if ((warp.exists & ~lanes) == 0) {
        clocks.all = time_;
        return;
    }
    uint32_t together[kWarpSize] = {};  // what one of them knows, all of them know now
    for (int lane : each(lanes))
        for (int other = 0; other < kWarpSize; ++other)
            together[other] = std::max(together[other], clocks.known[lane][other]);
    for (int lane : each(lanes)) together[lane] = time_;
    for (int lane : each(lanes)) std::copy_n(together, kWarpSize, clocks.known[lane]);
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
    clocks.all = std::max(clocks.all, barrier.warps[warp]);  // a barrier orders a warp's own lanes, too
}

bool Races::knows(int thread, int other, uint32_t clock) const {
    if (clock < barrier_clock_ || thread == other) return true;
    const WarpClocks& mine = warps_[static_cast<size_t>(thread / kWarpSize)];
    if (thread / kWarpSize != other / kWarpSize) return clock < mine.known_warps[other / kWarpSize];
    return clock < mine.all || clock < mine.known[thread % kWarpSize][other % kWarpSize];
}

// ---- shared memory

/// Calls visit(cell, thread) for what the lanes access.
template <class Visit>
void Races::for_each_cell(const Request& request, uint32_t lanes, Visit visit) {
    fit_cells(request.bytes);
    const size_t count = request.bytes >> cell_shift_;
    for (int lane : each(lanes)) {
        const size_t first = request.addresses[lane] >> cell_shift_;
        for (size_t cell = first; cell < first + count; ++cell) visit(cell, request.warp * kWarpSize + lane);
    }
}

/// Splits the cells if they are larger than `bytes`; each gets the history of the larger one that it was a part of.
void Races::fit_cells(unsigned bytes) {
    if (bytes >> cell_shift_ > 0) return;
    const unsigned shift = bytes == 2 ? 1 : 0;
    const size_t pieces = size_t(1) << (cell_shift_ - shift);
    const auto split = [pieces](auto& records) {
        auto whole = std::move(records);
        records.clear();
        for (const auto& record : whole) records.insert(records.end(), pieces, record);
    };
    split(writes_);
    split(reads_);
    cells_ *= pieces;
    cell_shift_ = shift;
}

inline void Races::check_written(size_t cell, int thread, const Request& request) {
    if (writes_[cell].clock >= block_clock_) return;
    Finding* finding = shared_finding(Kind::uninitialized, cell, request, 0);
    if (finding == nullptr) return;
    finding->threads = {thread};
    finding->detail = "reads shared memory that no thread of the block has written";
}

/// Whether the thread may read the cell, or write it if `will_write`.
bool Races::check_last_write(size_t cell, int thread, const Request& request, bool will_write) {
    const Write& last = writes_[cell];
    if (last.clock < block_clock_ || last.atomic) return true;
    const bool others_copy = last.in_flight && will_write && last.thread != thread;
    if (!last.in_flight && knows(thread, last.thread, last.clock)) return true;
    const Kind kind = last.in_flight && !others_copy ? Kind::missing_wait : Kind::race;
    Finding* finding = shared_finding(kind, cell, request, last.pc);
    if (finding == nullptr) return false;
    finding->threads = {last.thread, thread};
    if (others_copy)
        finding->detail = "writes where another thread's cp.async is still in flight";
    else if (last.in_flight)
        finding->detail = will_write ? "writes where a cp.async is still in flight"
                                     : "reads what a cp.async that nobody has waited for will write";
    else
        finding->detail = will_write ? "both write, in no order" : "one reads what the other writes, in no order";
    return false;
}

void Races::check_reads(size_t cell, int thread, const Request& request) {
    for (size_t warp = 0; warp < warps_.size(); ++warp) {
        const Read& read = reads_[warp * cells_ + cell];
        if (read.clock < barrier_clock_) continue;
        for (int lane : each(read.lanes)) {
            const int reader = static_cast<int>(warp) * kWarpSize + lane;
            if (knows(thread, reader, read.clock)) continue;
            if (Finding* finding = shared_finding(Kind::race, cell, request, read.pc)) {
                finding->threads = {reader, thread};
                finding->detail = "one writes what the other reads, in no order";
            }
            break;
        }
    }
}

void Races::shared_read(const Request& request) {
    fit_cells(request.bytes);
    const int first = first_of(request.lanes), first_thread = request.warp * kWarpSize;
    const uint32_t* clocks = warps_[static_cast<size_t>(request.warp)].clock;
    Read* reads = &reads_[static_cast<size_t>(request.warp) * cells_];
    // One address for all, and all at one clock, is read once, by many lanes.
    bool together = true;
    for_each_lane(request.lanes, [&](int lane) {
        together &= request.addresses[lane] == request.addresses[first] && clocks[lane] == clocks[first];
    });
    for_each_cell(request, together ? bit(first) : request.lanes, [&](size_t cell, int thread) {
        const int lane = thread - first_thread;
        const uint32_t readers = request.receivers ? request.receivers : together ? request.lanes : bit(lane);
        check_written(cell, thread, request);
        if (writes_[cell].clock >= barrier_clock_ || writes_[cell].in_flight)
            for (int reader : each(readers))
                if (!check_last_write(cell, first_thread + reader, request, false)) break;
        if (reads[cell].clock == clocks[lane])
            reads[cell].lanes |= readers;
        else
            reads[cell] = {clocks[lane], readers, request.pc};
    });
}

void Races::write_cell(size_t cell, int thread, const Request& request, bool in_flight) {
    check_last_write(cell, thread, request, true);
    check_reads(cell, thread, request);
    writes_[cell] = {clock(thread), request.pc, static_cast<uint16_t>(thread), false, in_flight};
}

void Races::shared_write(const Request& request) {
    for_each_cell(request, request.lanes, [&](size_t cell, int thread) { write_cell(cell, thread, request, false); });
}

void Races::copy_issued(const Request& request) {
    for_each_cell(request, request.lanes, [&](size_t cell, int thread) { write_cell(cell, thread, request, true); });
}

void Races::copy_landed(const Request& request) {
    // From here on it is as if the thread that waited had written itself.
    for_each_cell(request, request.lanes, [&](size_t cell, int thread) {
        writes_[cell] = {clock(thread), request.pc, static_cast<uint16_t>(thread), false, false};
    });
}

void Races::shared_atomic(const Request& request) {
    // Atomics race with nothing; they do make what they touch written.
    for_each_cell(request, request.lanes, [&](size_t cell, int thread) {
        check_written(cell, thread, request);
        writes_[cell] = {clock(thread), request.pc, static_cast<uint16_t>(thread), true, false};
    });
}

Finding* Races::shared_finding(Kind kind, size_t cell, const Request& request, uint32_t earlier_pc) {
    Finding* finding = worker_.occurred(kind, earlier_pc, request.pc);
    if (finding == nullptr) return nullptr;
    finding->space = "shared";
    finding->offset = cell << cell_shift_;
    finding->bytes = request.bytes;
    return finding;
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

    bool same_warp_and_time(const GlobalRecord& other) const {
        return block == other.block && clock == other.clock && warp == other.warp;
    }
};

struct GlobalCell {
    GlobalRecord write;
    GlobalRecord reads[2];  // the first of those that may still matter, and the last: enough to see most races
};

class GlobalShadow {
  public:
    explicit GlobalShadow(const Buffer& buffer)
        : begin_(buffer.begin & ~uintptr_t(3)), size_((buffer.end() - begin_ + 3) / 4 * sizeof(GlobalCell)) {
        void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        cells_ = static_cast<GlobalCell*>(memory);
    }
    GlobalShadow(const GlobalShadow&) = delete;
    ~GlobalShadow() { munmap(cells_, size_); }

    /// Calls visit(cell, lane, bytes) for the cells of every lane, while no other worker sees them.
    template <class Visit>
    void visit(const Request& request, Visit visit) {
        std::unique_lock<std::mutex> lock;  // of the page that the lanes are in, most often all in one
        for (int lane : each(request.lanes)) {
            const uint64_t address = request.addresses[lane];
            std::mutex& page = pages_[address / 4096 % kPageLocks];
            if (lock.mutex() != &page) {
                if (lock.owns_lock()) lock.unlock();  // one at a time, so that nobody waits in a circle
                lock = std::unique_lock<std::mutex>(page);
            }
            const unsigned bytes = request.bytes < 4 ? ((1u << request.bytes) - 1) << (address & 3) : 0xf;
            const size_t first = (address - begin_) / 4, count = std::max(1u, request.bytes / 4);
            for (size_t cell = first; cell < first + count; ++cell)
                visit(cells_[cell], lane, static_cast<uint8_t>(bytes));
        }
    }

  private:
    uintptr_t begin_;
    size_t size_;
    GlobalCell* cells_;
    static constexpr size_t kPageLocks = 64;
    std::mutex pages_[kPageLocks];
};

/// The same for what thread `other` of another block of this launch did.
bool Races::knows(int thread, uint32_t block, int other, uint32_t clock) const {
    if (block == block_id_) return knows(thread, other, clock);
    const auto known = known_blocks_.find(block);
    return known != known_blocks_.end() && clock < known->second;
}

void Races::global_access(const Buffer& buffer, const Request& request, bool write) {
    buffer.shadow->visit(request, [&](GlobalCell& cell, int lane, uint8_t bytes) {
        const int thread = request.warp * kWarpSize + lane;
        /// The lanes of the record whose access is in no order with this one.
        const auto unordered = [&](const GlobalRecord& record) {
            uint32_t lanes = 0;
            for (int other : each(record.lanes))
                if (!knows(thread, record.block, record.warp * kWarpSize + other, record.clock)) lanes |= bit(other);
            return lanes;
        };
        const auto check = [&](const GlobalRecord& earlier, const char* detail) {
            if ((earlier.bytes & bytes) == 0 || earlier.block < worker_.launch().first_block_id) return;
            const uint32_t lanes = unordered(earlier);
            if (lanes == 0) return;
            Finding* finding = worker_.occurred(Kind::race, earlier.pc, request.pc);
            if (finding == nullptr) return;
            finding->space = "global";
            finding->threads = {earlier.warp * kWarpSize + first_of(lanes), thread};
            finding->offset = request.addresses[lane] - buffer.begin;
            finding->buffer = buffer.name;
            finding->bytes = request.bytes;
            finding->detail = detail;
            if (earlier.block == block_id_) return;
            unsigned block[3];
            coordinates(earlier.block - worker_.launch().first_block_id, worker_.launch().grid, block);
            finding->detail += "; the first thread is in block (" + std::to_string(block[0]) + ", " +
                               std::to_string(block[1]) + ", " + std::to_string(block[2]) + ")";
        };
        GlobalRecord mine{block_id_, clock(thread), request.pc, bit(lane), static_cast<uint16_t>(request.warp), bytes};
        if (write) {
            check(cell.write, "both write, in no order");
            for (const GlobalRecord& read : cell.reads) check(read, "one writes what the other reads, in no order");
            if (cell.write.same_warp_and_time(mine) && cell.write.lanes == mine.lanes) mine.bytes |= cell.write.bytes;
            cell.write = mine;
            return;
        }
        check(cell.write, "one reads what the other writes, in no order");
        GlobalRecord* place = &cell.reads[1];
        for (GlobalRecord& read : cell.reads) {
            if (read.same_warp_and_time(mine) && read.bytes == bytes) {
                read.lanes |= bit(lane);
                return;
            }
            // What this thread and its block know of need not be remembered.
            if (read.block < worker_.launch().first_block_id || (read.block == block_id_ && unordered(read) == 0))
                place = &read;
        }
        *place = mine;
    });
}

// ---- order between blocks

static struct {
    std::mutex mutex;
    std::unordered_map<uint64_t, std::unordered_map<uint32_t, uint32_t>> at;  // atomic's address -> block id -> clock
} published;

void prepare_global_memory() {
    published.at.clear();
    for (Buffer& buffer : buffers())
        if (buffer.writable && buffer.shadow == nullptr) buffer.shadow = std::make_shared<GlobalShadow>(buffer);
}

void Races::fence(int warp, uint32_t lanes) {
    fence_clock_ = ++time_;
    for (int lane : each(lanes)) warps_[static_cast<size_t>(warp)].clock[lane] = time_;
}

void Races::global_atomic(uint64_t address) {
    std::lock_guard<std::mutex> lock(published.mutex);
    auto& blocks = published.at[address];
    if (fence_clock_ != 0) known_blocks_[block_id_] = fence_clock_;
    for (const auto& [block, clock] : known_blocks_) blocks[block] = std::max(blocks[block], clock);
    for (const auto& [block, clock] : blocks) known_blocks_[block] = std::max(known_blocks_[block], clock);
}

}  // namespace emulator
