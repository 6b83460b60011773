#include "emulator/trace.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "emulator/counters.h"

namespace emulator {

static uint32_t bit(int lane) { return uint32_t(1) << lane; }

// A key holds the pc in its low half, then the bytes for each lane, then what is done.
constexpr uint64_t kCopyLanded = 0xff;
constexpr uint64_t kBypassL1 = uint64_t(1) << 48;

constexpr uintptr_t kFar = 1 << 20;  // bytes from the nearest buffer at which naming it would mislead

static uint64_t key_of(uint32_t pc, unsigned bytes, uint64_t kind) { return pc | uint64_t(bytes) << 32 | kind << 40; }
static uint64_t key_of(uint32_t pc, unsigned bytes, Op op) { return key_of(pc, bytes, static_cast<uint64_t>(op)); }

void Trace::start_launch() {
    shared_ = worker_.shared();
    static const Buffer nowhere{0, 0, "", false, nullptr};
    std::fill(std::begin(likely_buffers_), std::end(likely_buffers_), &nowhere);
    sites_.clear();
    for (auto& recent : recent_sites_) recent.site = nullptr;
    logs_.resize(static_cast<size_t>(worker_.launch().threads + kWarpSize - 1) / kWarpSize);
    races.start_launch();
}

void Trace::start_block() {
    for (Log& log : logs_) memset(log.count, 0, sizeof log.count);
    races.start_block();
}

void Trace::end_block() {
    for (Warp& warp : worker_.warps()) {
        warp.full = 0;
        drain(warp, warp.exists);
    }
    races.end_block();
}

// ---- checks

inline Place Trace::place(uintptr_t address, unsigned bytes, bool write, uint32_t pc) {
    const auto within = [&](const char* begin, size_t size) {
        const uintptr_t offset = address - reinterpret_cast<uintptr_t>(begin);
        return offset < size && bytes <= size - offset;
    };
    if (within(shared_.dynamic_begin, shared_.dynamic_bytes) || within(shared_.static_begin, shared_.static_bytes))
        return Place::shared;
    const Buffer* likely = likely_buffer(pc);
    if (likely->contains(address, bytes) && (!write || likely->writable)) return Place::global;
    return place_slowly(address, bytes, write, pc);
}

Place Trace::place_slowly(uintptr_t address, unsigned bytes, bool write, uint32_t pc) {
    const Buffer* read_only = nullptr;
    for (const Buffer& buffer : buffers()) {
        if (!buffer.contains(address, bytes)) continue;
        if (!write || buffer.writable) {
            likely_buffer(pc) = &buffer;
            return Place::global;
        }
        read_only = &buffer;
    }
    if (read_only != nullptr) {
        if (Finding* finding = worker_.occurred(Kind::write_to_input, pc)) {
            finding->space = "global";
            finding->threads = {worker_.running().number};
            finding->offset = address - read_only->begin;
            finding->buffer = read_only->name;
            finding->bytes = bytes;
            finding->detail = "writes to '" + read_only->name + "', which the kernel may only read";
        }
        worker_.abandon();
    }
    // Local arrays, and the constants that the compiler has put beside the code.
    const Module& module = worker_.launch().module;
    if (worker_.on_a_stack(reinterpret_cast<void*>(address)) || module.contains(address)) return Place::uncounted;
    out_of_bounds(address, bytes, write, pc);
}

void Trace::out_of_bounds(uintptr_t address, unsigned bytes, bool write, uint32_t pc) {
    struct Extent {
        const char* space;
        std::string name;
        uintptr_t begin, end;
        uintptr_t distance(uintptr_t address) const { return address < begin ? begin - address : address - end; }
    };
    std::vector<Extent> extents;
    for (const Buffer& buffer : buffers()) extents.push_back({"global", buffer.name, buffer.begin, buffer.end()});
    const auto add_shared = [&](const char* name, const char* begin, size_t size) {
        const uintptr_t start = reinterpret_cast<uintptr_t>(begin);
        if (begin != nullptr) extents.push_back({"shared", name, start, start + size});
    };
    add_shared("dynamic shared memory", shared_.dynamic_begin, shared_.dynamic_bytes);
    add_shared("static shared memory", shared_.static_begin, shared_.static_bytes);
    const Extent nearest = *std::min_element(extents.begin(), extents.end(), [&](const Extent& a, const Extent& b) {
        const auto distance = [&](const Extent& extent) {
            return address + bytes > extent.begin && address < extent.end ? 0 : extent.distance(address);
        };
        return distance(a) < distance(b);
    });
    if (Finding* finding = worker_.occurred(Kind::out_of_bounds, pc)) {
        const std::string access = std::string(write ? "writes " : "reads ") + std::to_string(bytes) + " bytes ";
        const bool before = address < nearest.begin;
        const uintptr_t distance = before ? nearest.begin - address : address + bytes - nearest.end;
        finding->threads = {worker_.running().number};
        finding->bytes = bytes;
        if (distance > kFar) {
            char where[32];
            snprintf(where, sizeof where, "0x%zx", address);
            finding->space = "global";
            finding->detail = access + "at address " + where + ", far from every buffer";
        } else {
            const bool is_global = strcmp(nearest.space, "global") == 0;
            finding->space = nearest.space;
            finding->offset = address - nearest.begin;
            finding->buffer = is_global ? nearest.name : "";
            finding->detail = access + "that " + (before ? "begin " : "end ") + std::to_string(distance) +
                              (before ? " bytes before the start of " : " bytes past the end of ") +
                              (is_global ? '\'' + nearest.name + '\'' : nearest.name) + ", which has " +
                              std::to_string(nearest.end - nearest.begin);
        }
    }
    worker_.abandon();
}

inline void Trace::check_alignment(uintptr_t address, unsigned bytes, Place place, uint32_t pc) {
    if ((address & (bytes - 1)) != 0) misaligned(address, bytes, place, pc);
}

void Trace::misaligned(uintptr_t address, unsigned bytes, Place place, uint32_t pc) {
    if (Finding* finding = worker_.occurred(Kind::misaligned, pc)) {
        finding->threads = {worker_.running().number};
        finding->bytes = bytes;
        finding->space = place == Place::shared ? "shared" : "global";
        if (place == Place::shared) {
            const uintptr_t in_static = address - reinterpret_cast<uintptr_t>(shared_.static_begin);
            finding->offset = in_static < shared_.static_bytes
                                  ? in_static
                                  : address - reinterpret_cast<uintptr_t>(shared_.dynamic_begin);
        } else {
            const Buffer* buffer = buffer_of(address, false, pc);
            finding->offset = address - buffer->begin;
            finding->buffer = buffer->name;
        }
        finding->detail = "an access of " + std::to_string(bytes) + " bytes at an address that is " +
                          std::to_string(address & (bytes - 1)) + " more than a multiple of " + std::to_string(bytes);
    }
    worker_.abandon();
}

// ---- logs

void Trace::access(uintptr_t address, unsigned bytes, bool write, uint32_t pc) {
    const Place where = place(address, bytes, write, pc);
    if (where == Place::uncounted) return;
    check_alignment(address, bytes, where, pc);
    const Op load = where == Place::shared ? Op::shared_load : Op::global_load;
    const Op store = where == Place::shared ? Op::shared_store : Op::global_store;
    log(key_of(pc, bytes, write ? store : load), address, 0);
}

void Trace::copy_issued(const AsyncCopy& copy, bool bypass_l1) {
    const uintptr_t shared = reinterpret_cast<uintptr_t>(copy.shared),
                    global = reinterpret_cast<uintptr_t>(copy.global);
    check_shared(shared, copy.bytes, true, copy.pc);
    if (copy.source_bytes > 0) {
        const Place where = place(global, copy.source_bytes, false, copy.pc);
        check_alignment(global, copy.bytes, where, copy.pc);
    }
    log(key_of(copy.pc, copy.bytes, Op::cp_async) | (bypass_l1 ? kBypassL1 : 0), global,
        shared | uint64_t(copy.source_bytes) << 56);
}

void Trace::copy_landed(const AsyncCopy& copy) {
    log(key_of(copy.pc, copy.bytes, kCopyLanded), reinterpret_cast<uintptr_t>(copy.shared), 0);
}

void Trace::check_shared(uintptr_t address, unsigned bytes, bool write, uint32_t pc) {
    const Place where = place(address, bytes, write, pc);
    if (where == Place::shared) return check_alignment(address, bytes, where, pc);
    if (Finding* finding = worker_.occurred(Kind::out_of_bounds, pc)) {
        finding->space = "shared";
        finding->threads = {worker_.running().number};
        finding->bytes = bytes;
        finding->detail = "the instruction takes an address in shared memory, and this one is not";
    }
    worker_.abandon();
}

Place Trace::check_atomic(uintptr_t address, unsigned bytes, uint32_t pc) {
    const Place where = place(address, bytes, true, pc);
    if (where != Place::uncounted) check_alignment(address, bytes, where, pc);
    return where;
}

inline void Trace::log(uint64_t key, uintptr_t address, uint64_t copy) {
    const int thread = worker_.running().number, lane = thread % kWarpSize;
    Log& log = logs_[static_cast<size_t>(thread / kWarpSize)];
    while (log.count[lane] == Log::kRows) worker_.wait_for_drain();  // a drain may empty other lanes first
    const unsigned row = log.count[lane]++;
    log.keys[row][lane] = key;
    log.addresses[row][lane] = address;
    if (copy != 0) log.copies[row][lane] = copy;
}

// ---- merging

void Trace::drain(Warp& warp, uint32_t lanes) {
    Log& log = logs_[static_cast<size_t>(warp.number)];
    uint32_t pending = 0;  // lanes that still have something
    for (int lane = 0; lane < kWarpSize; ++lane) pending |= uint32_t(log.count[lane] != 0) << lane;
    pending &= lanes;
    if (pending == 0) return;
    const uint32_t drained = pending;
    uint8_t position[kWarpSize] = {};
    while (pending != 0 && (warp.full & drained & ~pending) == 0) {
        const int first = __builtin_ctz(pending);
        const unsigned row = position[first];
        const uint64_t key = log.keys[row][first];
        bool same_row = true, same_key = true;
        for (uint32_t rest = pending & (pending - 1); rest != 0; rest &= rest - 1) {
            const int lane = __builtin_ctz(rest);
            same_row &= position[lane] == row;
            same_key &= log.keys[position[lane]][lane] == key;
        }
        if (same_row && same_key) {
            // The lanes run together. They go on doing so, row after row, until one has nothing left or differs.
            unsigned end = Log::kRows;
            for (uint32_t rest = pending; rest != 0; rest &= rest - 1)
                end = std::min<unsigned>(end, log.count[__builtin_ctz(rest)]);
            unsigned next = row;
            do {
                request(warp.number, log.keys[next][first], pending, log.addresses[next], log.copies[next]);
                if (++next == end) break;
                const uint64_t next_key = log.keys[next][first];
                uint64_t difference = 0;
                if (pending == ~uint32_t(0)) {
                    for (int lane = 0; lane < kWarpSize; ++lane) difference |= log.keys[next][lane] ^ next_key;
                } else {
                    for (uint32_t rest = pending; rest != 0; rest &= rest - 1)
                        difference |= log.keys[next][__builtin_ctz(rest)] ^ next_key;
                }
                same_key = difference == 0;
            } while (same_key);
            for (uint32_t rest = pending; rest != 0; rest &= rest - 1) {
                const int lane = __builtin_ctz(rest);
                position[lane] = static_cast<uint8_t>(next);
                if (next == log.count[lane]) pending &= ~bit(lane);
            }
        } else {
            const uint64_t chosen = same_key ? key : choose(log, pending, position);
            uint64_t addresses[kWarpSize], copies[kWarpSize];
            uint32_t active = 0;
            for (uint32_t rest = pending; rest != 0; rest &= rest - 1) {
                const int lane = __builtin_ctz(rest);
                const unsigned at = position[lane];
                if (log.keys[at][lane] != chosen) continue;
                active |= bit(lane);
                addresses[lane] = log.addresses[at][lane];
                copies[lane] = log.copies[at][lane];
                if (++position[lane] == log.count[lane]) pending &= ~bit(lane);
            }
            request(warp.number, chosen, active, addresses, copies);
        }
    }
    for (uint32_t rest = drained; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        const unsigned from = position[lane], left = log.count[lane] - from;
        for (unsigned row = 0; from > 0 && row < left; ++row) {
            log.keys[row][lane] = log.keys[from + row][lane];
            log.addresses[row][lane] = log.addresses[from + row][lane];
            log.copies[row][lane] = log.copies[from + row][lane];
        }
        log.count[lane] = static_cast<uint8_t>(left);
    }
}

/// The lanes are about to do different things, and a GPU would run one branch after the other. Which one first does not
/// show in the logs, so take the instruction that the other lanes reach latest, or never: those who are about to do it
/// too should catch up and do it together with the rest.
uint64_t Trace::choose(const Log& log, uint32_t pending, const uint8_t* position) const {
    uint64_t best = 0;
    int best_distance = -1;
    for (uint32_t rest = pending; rest != 0;) {
        const int first = __builtin_ctz(rest);
        const uint64_t key = log.keys[position[first]][first];
        uint32_t there = 0;
        int distance = INT32_MAX;
        for (uint32_t others = pending; others != 0; others &= others - 1) {
            const int lane = __builtin_ctz(others);
            if (log.keys[position[lane]][lane] == key) {
                there |= bit(lane);
                continue;
            }
            for (int row = position[lane] + 1; row < log.count[lane] && row - position[lane] < distance; ++row)
                if (log.keys[row][lane] == key) distance = row - position[lane];
        }
        rest &= ~there;
        const bool lower = static_cast<uint32_t>(key) < static_cast<uint32_t>(best);
        if (distance > best_distance || (distance == best_distance && lower)) {
            best = key;
            best_distance = distance;
        }
    }
    return best;
}

// ---- requests

Site& Trace::site(uint32_t pc, Op op) {
    auto& recent = recent_sites_[(pc ^ pc >> 8 ^ static_cast<uint32_t>(op)) % 256];
    if (recent.site == nullptr || recent.pc != pc || recent.op != op) {
        recent.pc = pc;
        recent.op = op;
        recent.site = &sites_[{pc, op}];
    }
    return *recent.site;
}

void Trace::count(const Collective& collective) {
    Site& site = this->site(collective.pc, collective.op);
    site.requests += static_cast<uint64_t>(collective.instructions);
    site.lanes +=
        static_cast<uint64_t>(__builtin_popcount(collective.arrived)) * static_cast<uint64_t>(collective.instructions);
    site.bytes = collective.bytes;
}

void Trace::matrices(const Warp& warp, const Collective& collective, const uint64_t* rows, int count) {
    const Wavefronts wavefronts = matrix_wavefronts(rows, count);
    Site& site = this->site(collective.pc, collective.op);
    site.wavefronts += wavefronts.taken;
    site.ideal += wavefronts.ideal;
    const uint32_t lanes = count == 4 ? ~uint32_t(0) : bit(8 * count) - 1;
    Request request{warp.number, lanes, 16, collective.pc, rows};
    if (collective.op == Op::stmatrix) return races.shared_write(request);
    request.receivers = collective.arrived;
    races.shared_read(request);
}

void Trace::request(int warp, uint64_t key, uint32_t lanes, const uint64_t* addresses, const uint64_t* copies) {
    const uint32_t pc = static_cast<uint32_t>(key);
    const unsigned bytes = key >> 32 & 0xff;
    const uint64_t kind = key >> 40 & 0xff;
    Request request{warp, lanes, bytes, pc, addresses};
    if (kind == kCopyLanded) return races.copy_landed(request);

    const Op op = static_cast<Op>(kind);
    Site& site = this->site(pc, op);
    ++site.requests;
    site.lanes += static_cast<uint64_t>(__builtin_popcount(lanes));
    site.bytes = bytes;
    if (op == Op::shared_load || op == Op::shared_store) {
        const Wavefronts wavefronts = shared_wavefronts(addresses, lanes, bytes, op == Op::shared_load);
        site.wavefronts += wavefronts.taken;
        site.ideal += wavefronts.ideal;
        if (op == Op::shared_load)
            races.shared_read(request);
        else
            races.shared_write(request);
    } else if (op == Op::cp_async) {
        uint64_t shared[kWarpSize];
        uint32_t reading = 0;  // lanes that do not only fill with zeros
        for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
            const int lane = __builtin_ctz(rest);
            shared[lane] = copies[lane] & 0xffffffffffffff;
            reading |= uint32_t(copies[lane] >> 56 != 0) << lane;
        }
        if (reading != 0) {
            const uint64_t origin = origin_of(addresses[__builtin_ctz(reading)], pc);
            site.sectors += copy_sectors(shared, addresses, reading, bytes, origin, (key & kBypassL1) != 0);
            global_request({warp, reading, bytes, pc, addresses}, false);
        }
        const Wavefronts wavefronts = shared_wavefronts(shared, lanes, bytes, false);
        site.wavefronts += wavefronts.taken;
        site.ideal += wavefronts.ideal;
        request.addresses = shared;
        races.copy_issued(request);
    } else {
        site.sectors += global_sectors(request);
        global_request(request, op == Op::global_store);
    }
}

/// The buffer that a global access was found to be in; null for one of the module's constants.
const Buffer* Trace::buffer_of(uint64_t address, bool write, uint32_t pc) {
    const auto is_it = [&](const Buffer& buffer) { return buffer.contains(address, 1) && (!write || buffer.writable); };
    if (is_it(*likely_buffer(pc))) return likely_buffer(pc);
    const auto found = std::find_if(buffers().begin(), buffers().end(), is_it);
    return found != buffers().end() ? &*found : nullptr;
}

uint64_t Trace::origin_of(uint64_t address, uint32_t pc) {
    const Buffer* buffer = buffer_of(address, false, pc);
    return buffer != nullptr ? buffer->begin : 0;
}

unsigned Trace::global_sectors(const Request& request) {
    const uint64_t origin = origin_of(request.addresses[__builtin_ctz(request.lanes)], request.pc);
    return sectors(request.addresses, request.lanes, request.bytes, origin);
}

/// Passes a global access on to the race detector, buffer by buffer. What is only read cannot race.
void Trace::global_request(const Request& request, bool write) {
    for (uint32_t rest = request.lanes; rest != 0;) {
        const int first = __builtin_ctz(rest);
        const Buffer* buffer = buffer_of(request.addresses[first], write, request.pc);
        uint32_t inside = bit(first);
        for (uint32_t lanes = rest; buffer != nullptr && lanes != 0; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes);
            inside |= uint32_t(buffer->contains(request.addresses[lane], 1)) << lane;
        }
        rest &= ~inside;
        if (buffer == nullptr || buffer->shadow == nullptr) continue;
        Request part = request;
        part.lanes = inside;
        if (write)
            races.global_write(*buffer, part);
        else
            races.global_read(*buffer, part);
    }
}

}  // namespace emulator
