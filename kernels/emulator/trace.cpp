#include "emulator/trace.h"

#include <algorithm>

#include "emulator/counters.h"

namespace emulator {

// A key holds the pc in its low half, then the bytes for each lane, then what is done.
constexpr uint64_t kCopyLanded = 0xff;
constexpr uint64_t kBypassL1 = uint64_t(1) << 48;

static uint64_t key_of(uint32_t pc, unsigned bytes, uint64_t what) { return pc | uint64_t(bytes) << 32 | what << 40; }
static Op op_of(uint64_t key) { return static_cast<Op>(key >> 40 & 0xff); }
static uint64_t key_of(uint32_t pc, unsigned bytes, Op op) { return key_of(pc, bytes, static_cast<uint64_t>(op)); }

void Trace::start_launch() {
    sites_.clear();
    races.start_launch();
}

void Trace::start_block() {
    for (Log& log : logs_) log.size = 0;
    races.start_block();
}

void Trace::end_block() {
    Warp& warp = worker_.warp();
    warp.full = 0;
    drain(warp, kAllLanes);
}

Sites Trace::sites() const {
    Sites sites;
    for (const auto& [key, site] : sites_) sites[{static_cast<uint32_t>(key), static_cast<Op>(key >> 32)}] = site;
    return sites;
}

static void add(Site& site, const Wavefronts& wavefronts) {
    site.wavefronts += wavefronts.taken;
    site.ideal += wavefronts.ideal;
}

// ---- logs

void Trace::access(const Access& access) {
    const Place place = check(worker_, access);
    if (place.space == Space::local) return;
    const Op op = place.space == Space::shared ? (access.write ? Op::shared_store : Op::shared_load)
                                               : (access.write ? Op::global_store : Op::global_load);
    log(key_of(access.pc, access.bytes, op), place.where);
}

void Trace::copy_issued(const AsyncCopy& copy, bool bypass_l1) {
    const uint64_t target =
        check_shared(worker_, {reinterpret_cast<uintptr_t>(copy.shared), copy.bytes, true, copy.pc});
    const uintptr_t source = reinterpret_cast<uintptr_t>(copy.global);
    if (copy.source_bytes > 0) check(worker_, {source, copy.source_bytes, false, copy.pc}, copy.bytes);
    log(key_of(copy.pc, copy.bytes, Op::cp_async) | (bypass_l1 ? kBypassL1 : 0), source,
        target << 8 | copy.source_bytes);
}

void Trace::copy_landed(const AsyncCopy& copy) {
    log(key_of(copy.pc, copy.bytes, kCopyLanded),
        worker_.shared().offset(reinterpret_cast<uintptr_t>(copy.shared), copy.bytes));
}

inline void Trace::log(uint64_t key, uintptr_t address, uint64_t target) {
    Log& log = logs_[worker_.lane()];
    while (log.size == Log::kEntries) worker_.wait_for_drain();  // a drain may empty other lanes' first
    log.keys[log.size] = key;
    log.addresses[log.size] = address;
    log.targets[log.size] = target;
    ++log.size;
}

// ---- merging

void Trace::drain(Warp& warp, uint32_t lanes) {
    uint32_t pending = 0;  // lanes with something left in their logs
    for (int lane : each(lanes))
        if (logs_[lane].size > 0) pending |= bit(lane);
    const uint32_t drained = pending;
    int position[kWarpSize] = {};
    while (pending != 0 && (warp.full & drained & ~pending) == 0) {
        uint64_t addresses[kWarpSize], targets[kWarpSize];
        const auto gather = [&](uint64_t key) {
            uint32_t lanes = 0;
            for_each_lane(pending, [&](int lane) {
                const Log& log = logs_[lane];
                const bool same = log.keys[position[lane]] == key;
                lanes |= uint32_t(same) << lane;
                addresses[lane] = log.addresses[position[lane]];
                targets[lane] = log.targets[position[lane]];
            });
            return lanes;
        };
        uint64_t key = logs_[first_of(pending)].keys[position[first_of(pending)]];
        uint32_t active = gather(key);
        if (active != pending) active = gather(key = choose(pending, position));
        for_each_lane(active, [&](int lane) {
            ++position[lane];
            if (position[lane] == logs_[lane].size) pending &= ~bit(lane);
        });
        request(warp.number, key, active, addresses, targets);
    }
    for (int lane : each(drained)) {
        Log& log = logs_[lane];
        for (uint64_t* column : {log.keys, log.addresses, log.targets})
            std::copy(column + position[lane], column + log.size, column);
        log.size -= position[lane];
    }
}

/// The instruction that goes first, of those that the lanes are about to execute. A GPU would run one branch after the
/// other, and which one first does not show in the logs. So take the one that the other lanes reach latest, or never:
/// those who are about to do it too should catch up and do it together with the rest.
uint64_t Trace::choose(uint32_t pending, const int* position) const {
    uint64_t best = 0;
    std::ptrdiff_t best_distance = -1;
    for (uint32_t rest = pending; rest != 0;) {
        const uint64_t key = logs_[first_of(rest)].keys[position[first_of(rest)]];
        std::ptrdiff_t distance = PTRDIFF_MAX;
        for (int lane : each(pending)) {
            const uint64_t *next = logs_[lane].keys + position[lane], *end = logs_[lane].keys + logs_[lane].size;
            const uint64_t* there = std::find(next, end, key);
            if (there == next)
                rest &= ~bit(lane);
            else if (there != end)
                distance = std::min(distance, there - next);
        }
        const bool lower = static_cast<uint32_t>(key) < static_cast<uint32_t>(best);
        if (distance > best_distance || (distance == best_distance && lower)) {
            best = key;
            best_distance = distance;
        }
    }
    return best;
}

// ---- requests

void Trace::request(int warp, uint64_t key, uint32_t lanes, const uint64_t* addresses, const uint64_t* targets) {
    Request request{warp, lanes, static_cast<unsigned>(key >> 32 & 0xff), static_cast<uint32_t>(key), addresses};
    if ((key >> 40 & 0xff) == kCopyLanded) return races.copy_landed(request);

    const Op op = op_of(key);
    Site& site = this->site(request.pc, op);
    ++site.requests;
    site.lanes += number_of(lanes);
    site.bytes = request.bytes;
    if (op == Op::shared_load || op == Op::shared_store) {
        add(site, shared_wavefronts(addresses, lanes, request.bytes, op == Op::shared_load));
        if (op == Op::shared_load)
            races.shared_read(request);
        else
            races.shared_write(request);
    } else if (op == Op::cp_async) {
        uint64_t shared[kWarpSize];
        Request read = request;  // by the lanes that do not only fill with zeros
        for (int lane : each(lanes)) {
            shared[lane] = targets[lane] >> 8;
            site.read_bytes += targets[lane] & 0xff;
            if ((targets[lane] & 0xff) == 0) read.lanes &= ~bit(lane);
        }
        if (read.lanes != 0) {
            ++site.reads;
            site.sectors +=
                key & kBypassL1 ? bypassing_sectors(shared, addresses, read.lanes, origin(read)) : global_sectors(read);
            global_request(read, false);
        }
        add(site, shared_wavefronts(shared, lanes, request.bytes, false));
        request.addresses = shared;
        races.copy_issued(request);
    } else {
        site.sectors += global_sectors(request);
        global_request(request, op == Op::global_store);
    }
}

/// The buffer that the first of these lanes is in: most often the one that the instruction met last. Null for one of
/// the module's constants.
const Buffer* Trace::buffer(const Request& request, uint32_t lanes, bool write) const {
    const uint64_t address = request.addresses[first_of(lanes)];
    const Buffer* recent = worker_.recent_buffer(request.pc);
    return recent != nullptr && recent->contains(address, 1) ? recent : find_buffer(address, 1, write);
}

/// From where sectors are counted: the start of the buffer, which cudaMalloc would have put at a multiple of 256 bytes.
uint64_t Trace::origin(const Request& request) const {
    const Buffer* first = buffer(request, request.lanes, false);
    return first != nullptr ? first->begin : 0;
}

unsigned Trace::global_sectors(const Request& request) const {
    return sectors(request.addresses, request.lanes, request.bytes, origin(request));
}

void Trace::count(const Collective& collective) {
    Site& site = this->site(collective.pc, collective.op);
    site.requests += collective.instructions;
    site.lanes += number_of(collective.arrived) * collective.instructions;
    site.bytes = collective.bytes;
}

void Trace::matrices(const Warp& warp, const Collective& collective, const uint64_t* rows, int count) {
    add(site(collective.pc, collective.op), matrix_wavefronts(rows, count));
    Request request{warp.number, kAllLanes >> (kWarpSize - 8 * count), 16, collective.pc, rows};
    if (collective.op == Op::stmatrix) return races.shared_write(request);
    request.receivers = collective.arrived;
    races.shared_read(request);
}

/// Passes a global access on to the race detector, buffer by buffer. What is only read cannot race.
void Trace::global_request(const Request& request, bool write) {
    for (uint32_t rest = request.lanes; rest != 0;) {
        const Buffer* buffer = this->buffer(request, rest, write);
        if (buffer == nullptr) return;  // a cp.async of a constant
        Request part = request;
        part.lanes = 0;
        for_each_lane(rest,
                      [&](int lane) { part.lanes |= uint32_t(buffer->contains(request.addresses[lane], 1)) << lane; });
        rest &= ~part.lanes;
        if (buffer->shadow != nullptr) races.global_access(*buffer, part, write);
    }
}

}  // namespace emulator
