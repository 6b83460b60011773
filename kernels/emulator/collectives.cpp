// What the lanes of a warp do together. Every lane brings its operands; the last to arrive computes for all.
#include <cstring>

#include "emulator/half.h"
#include "emulator/machine.h"
#include "emulator/runtime.h"
#include "emulator/trace.h"

namespace emulator {

template <class T>
static T& operand(Warp& warp, int lane) {
    return *static_cast<T*>(warp.operands[lane]);
}

// ---- shuffles, votes, matches, reductions

/// The value that a lane brings, and the one that it takes away.
struct Exchange {
    uint64_t value;
    int how = 0;  // a shuffle: the lane to read from; a reduction: the operation
    uint64_t result = 0;
};

static uint64_t exchange(Op op, uint32_t mask, Perform perform, Exchange mine, const void* return_address) {
    Worker& worker = *current_worker;
    worker.collective({op, mask, worker.pc(return_address), perform}, &mine);
    return mine.result;
}

/// The lane that `lane` reads from, as the PTX manual's pseudocode for shfl.sync has it.
static int shuffle_source(EmulatorShuffle kind, int lane, int operand, int width) {
    const int first = lane & ~(width - 1), last = first + width - 1;
    switch (kind) {
        case EMULATOR_SHUFFLE_INDEX: return first + (operand & (width - 1));
        case EMULATOR_SHUFFLE_UP: return lane - (operand & 31) >= first ? lane - (operand & 31) : lane;
        case EMULATOR_SHUFFLE_DOWN: return lane + (operand & 31) <= last ? lane + (operand & 31) : lane;
        case EMULATOR_SHUFFLE_XOR: break;
    }
    return (lane ^ (operand & 31)) <= last ? lane ^ (operand & 31) : lane;
}

static void shuffle(Warp& warp, const Collective& collective) {
    for (int lane : each(collective.arrived)) {
        Exchange& mine = operand<Exchange>(warp, lane);
        if (collective.arrived & bit(mine.how)) {
            mine.result = operand<Exchange>(warp, mine.how).value;
            continue;
        }
        mine.result = ~uint64_t(0);  // NaN
        if (Finding* finding = current_worker->occurred(Kind::warp_mask, collective.pc)) {
            finding->threads = {warp.number * kWarpSize + lane};
            finding->detail = "lane " + std::to_string(lane) + " reads from lane " + std::to_string(mine.how) +
                              ", which takes no part in the shuffle";
        }
    }
}

static void ballot(Warp& warp, const Collective& collective) {
    uint32_t votes = 0;
    for (int lane : each(collective.arrived))
        if (operand<Exchange>(warp, lane).value != 0) votes |= bit(lane);
    for (int lane : each(collective.arrived)) operand<Exchange>(warp, lane).result = votes;
}

static void match_any(Warp& warp, const Collective& collective) {
    for (int lane : each(collective.arrived)) {
        Exchange& mine = operand<Exchange>(warp, lane);
        for (int other : each(collective.arrived))
            if (operand<Exchange>(warp, other).value == mine.value) mine.result |= bit(other);
    }
}

/// The new value of `old`, from bits to bits. Integer is the unsigned type of the operands' width, Float the float.
template <class Integer, class Float>
static Integer combine(EmulatorOperation operation, Integer old, Integer value, Integer expected = 0) {
    using Signed = std::make_signed_t<Integer>;
    const bool less = value < old, signed_less = static_cast<Signed>(value) < static_cast<Signed>(old);
    switch (operation) {
        case EMULATOR_ADD: return old + value;
        case EMULATOR_ADD_FLOAT: return bit_cast<Integer>(bit_cast<Float>(old) + bit_cast<Float>(value));
        case EMULATOR_MIN_SIGNED: return signed_less ? value : old;
        case EMULATOR_MAX_SIGNED: return signed_less ? old : value;
        case EMULATOR_MIN_UNSIGNED: return less ? value : old;
        case EMULATOR_MAX_UNSIGNED: return less ? old : value;
        case EMULATOR_AND: return old & value;
        case EMULATOR_OR: return old | value;
        case EMULATOR_XOR: return old ^ value;
        case EMULATOR_EXCHANGE: return value;
        case EMULATOR_COMPARE_AND_SWAP: break;
    }
    return old == expected ? value : old;
}

static void reduce(Warp& warp, const Collective& collective) {
    const Exchange& first = operand<Exchange>(warp, first_of(collective.arrived));
    uint32_t result = static_cast<uint32_t>(first.value);
    for (int lane : each(collective.arrived & (collective.arrived - 1)))
        result = combine<uint32_t, float>(static_cast<EmulatorOperation>(first.how), result,
                                          static_cast<uint32_t>(operand<Exchange>(warp, lane).value));
    for (int lane : each(collective.arrived)) operand<Exchange>(warp, lane).result = result;
}

// ---- atomics and fences: lanes of a warp that come to one together are one instruction, whoever they are

struct Atomic {
    EmulatorOperation operation;
    void* address;
    uint64_t value, expected;
    Place place;  // only known in instrumented launches
    uint64_t result;
};

template <class Integer, class Float>
static void update(Atomic& atomic) {
    Integer* address = static_cast<Integer*>(atomic.address);
    Integer old = __atomic_load_n(address, __ATOMIC_SEQ_CST), wanted;
    do {
        wanted = combine<Integer, Float>(atomic.operation, old, static_cast<Integer>(atomic.value),
                                         static_cast<Integer>(atomic.expected));
    } while (!__atomic_compare_exchange_n(address, &old, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    atomic.result = old;
}

static void perform_atomic(Warp& warp, const Collective& collective) {
    Trace* trace = current_worker->trace();
    uint64_t addresses[kWarpSize];
    Request shared{warp.number, 0, collective.bytes, collective.pc, addresses}, global = shared;
    for (int lane : each(collective.arrived)) {
        Atomic& atomic = operand<Atomic>(warp, lane);
        addresses[lane] = atomic.place.where;
        if (atomic.place.space == Space::shared) shared.lanes |= bit(lane);
        if (atomic.place.space == Space::global) global.lanes |= bit(lane);
        // What this block publishes must be there before another block can see the new value; what others published
        // must be learned after the old one has been seen.
        const bool between_blocks = trace != nullptr && atomic.place.space == Space::global;
        if (between_blocks) trace->races.global_atomic(addresses[lane]);
        if (collective.bytes == 4)
            update<uint32_t, float>(atomic);
        else
            update<uint64_t, double>(atomic);
        if (between_blocks) trace->races.global_atomic(addresses[lane]);
    }
    if (shared.lanes != 0) trace->races.shared_atomic(shared);
    if (global.lanes != 0) trace->site(collective.pc, Op::atomic).sectors += trace->global_sectors(global);
}

static void perform_fence(Warp& warp, const Collective& collective) {
    current_worker->trace()->races.fence(warp.number, collective.arrived);
}

// ---- matrices

/// Matrices take all 32 lanes. If some have returned, the instruction is reported and left undone.
static bool whole_warp(const Warp& warp, const Collective& collective) {
    if (collective.arrived == kAllLanes) return true;
    if (Finding* finding = current_worker->occurred(Kind::divergent_barrier, collective.pc)) {
        finding->threads = {warp.number * kWarpSize + first_of(collective.arrived)};
        finding->detail = std::string(name(collective.op)) + " by a warp that lacks some of its 32 lanes";
    }
    return false;
}

/// mma.m16n8k16. The comment in flash/ptx/mma.cuh draws the fragments.
struct Mma {
    EmulatorFragment a;
    uint32_t b[2];
    EmulatorAccumulator d;
};

template <bool BFLOAT16>
static float element(uint32_t pair, int half) {
    const uint16_t bits = static_cast<uint16_t>(pair >> 16 * half);
    return BFLOAT16 ? bfloat16_to_float(bits) : half_to_float(bits);
}

/// Eight columns, which the CPU adds up at once. Much time is spent here: loops that -O2 would keep are written out.
typedef float Row __attribute__((vector_size(32)));
union Rows {
    float at[16][8];
    Row row[16];
};

template <bool BFLOAT16>
static void mma(Warp& warp, const Collective& collective) {
    if (!whole_warp(warp, collective)) return;
    float a[16][16];
    Rows b, d;
    for (int lane = 0; lane < kWarpSize; ++lane) {
        const Mma& mine = operand<Mma>(warp, lane);
        const int group = lane / 4, pair = lane % 4 * 2;
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            float* two = &a[group + i % 2 * 8][pair + i / 2 * 8];
            two[0] = element<BFLOAT16>(mine.a.r[i], 0);
            two[1] = element<BFLOAT16>(mine.a.r[i], 1);
            d.at[group + i / 2 * 8][pair + i % 2] = mine.d.r[i];
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            b.at[pair + i * 8][group] = element<BFLOAT16>(mine.b[i], 0);
            b.at[pair + i * 8 + 1][group] = element<BFLOAT16>(mine.b[i], 1);
        }
    }
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k) d.row[row] += a[row][k] * b.row[k];
    for (int lane = 0; lane < kWarpSize; ++lane) {
        const int group = lane / 4, pair = lane % 4 * 2;
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) operand<Mma>(warp, lane).d.r[i] = d.at[group + i / 2 * 8][pair + i % 2];
    }
}

/// ldmatrix, stmatrix. The comment in flash/ptx/ldmatrix.cuh says which lane holds what.
struct Matrices {
    char* row;
    uint64_t offset;  // the row's, in an instrumented launch
    int count;
    bool transposed;
    EmulatorFragment fragment;
};

static void move_matrices(Warp& warp, const Collective& collective) {
    if (!whole_warp(warp, collective)) return;
    const int count = operand<Matrices>(warp, 0).count;
    const bool transposed = operand<Matrices>(warp, 0).transposed;
    if (Trace* trace = current_worker->trace()) {
        uint64_t rows[kWarpSize];
        for (int lane = 0; lane < 8 * count; ++lane) rows[lane] = operand<Matrices>(warp, lane).offset;
        trace->matrices(warp, collective, rows, count);
    }
    for (int matrix = 0; matrix < count; ++matrix) {
        for (int lane = 0; lane < kWarpSize; ++lane) {
            uint32_t& pair = operand<Matrices>(warp, lane).fragment.r[matrix];
            for (int half = 0; half < 2; ++half) {
                const int major = lane / 4, minor = lane % 4 * 2 + half;
                const int row = transposed ? minor : major, column = transposed ? major : minor;
                char* element = operand<Matrices>(warp, 8 * matrix + row).row + 2 * column;
                char* lanes_own = reinterpret_cast<char*>(&pair) + 2 * half;
                if (collective.op == Op::ldmatrix)
                    memcpy(lanes_own, element, 2);
                else
                    memcpy(element, lanes_own, 2);
            }
        }
    }
}

static EmulatorFragment matrices(Op op, Matrices mine, const void* return_address) {
    Worker& worker = *current_worker;
    Collective collective{op, kAllLanes, worker.pc(return_address), move_matrices};
    collective.bytes = 16;
    if (worker.trace() != nullptr && worker.lane() < 8 * mine.count)
        mine.offset =
            check_shared(worker, {reinterpret_cast<uintptr_t>(mine.row), 16, op == Op::stmatrix, collective.pc});
    worker.collective(collective, &mine);
    return mine.fragment;
}

}  // namespace emulator

using namespace emulator;

void emulator_syncwarp(uint32_t mask) {
    Worker& worker = *current_worker;
    worker.collective({Op::syncwarp, mask, worker.pc(__builtin_return_address(0)), nullptr}, nullptr);
}

uint64_t emulator_shuffle(EmulatorShuffle kind, uint32_t mask, uint64_t value, unsigned bytes, int operand, int width) {
    Worker& worker = *current_worker;
    Exchange mine{value, shuffle_source(kind, worker.lane(), operand, width)};
    Collective collective{Op::shuffle, mask, worker.pc(__builtin_return_address(0)), shuffle};
    collective.instructions = bytes / 4;
    collective.bytes = bytes;
    worker.collective(collective, &mine);
    return mine.result;
}

uint32_t emulator_ballot(uint32_t mask, bool predicate) {
    return static_cast<uint32_t>(exchange(Op::vote, mask, ballot, {predicate}, __builtin_return_address(0)));
}

uint32_t emulator_active_mask() {
    return static_cast<uint32_t>(exchange(Op::vote, kWhoeverIsThere, ballot, {true}, __builtin_return_address(0)));
}

uint32_t emulator_match_any(uint32_t mask, uint64_t value) {
    return static_cast<uint32_t>(exchange(Op::match, mask, match_any, {value}, __builtin_return_address(0)));
}

uint32_t emulator_reduce(EmulatorOperation operation, uint32_t mask, uint32_t value) {
    return static_cast<uint32_t>(exchange(Op::reduce, mask, reduce, {value, operation}, __builtin_return_address(0)));
}

uint64_t emulator_atomic(EmulatorOperation operation, void* address, unsigned bytes, uint64_t value,
                         uint64_t expected) {
    Worker& worker = *current_worker;
    Collective collective{Op::atomic, kWhoeverIsThere, worker.pc(__builtin_return_address(0)), perform_atomic};
    collective.bytes = bytes;
    Atomic mine{operation, address, value, expected, {Space::local, 0}, 0};
    if (worker.trace() != nullptr)
        mine.place = check(worker, {reinterpret_cast<uintptr_t>(address), bytes, true, collective.pc});
    worker.collective(collective, &mine);
    return mine.result;
}

void emulator_fence() {
    Worker& worker = *current_worker;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (worker.trace() == nullptr) return;
    worker.collective({Op::fence, kWhoeverIsThere, worker.pc(__builtin_return_address(0)), perform_fence}, nullptr);
}

EmulatorAccumulator emulator_mma_m16n8k16(bool bfloat16, EmulatorFragment a, uint32_t b0, uint32_t b1,
                                          EmulatorAccumulator c) {
    Worker& worker = *current_worker;
    Mma mine{a, {b0, b1}, c};
    const Perform perform = bfloat16 ? mma<true> : mma<false>;
    worker.collective({Op::mma, kAllLanes, worker.pc(__builtin_return_address(0)), perform}, &mine);
    return mine.d;
}

EmulatorFragment emulator_ldmatrix(int count, bool transposed, const void* row) {
    char* from = const_cast<char*>(static_cast<const char*>(row));
    return matrices(Op::ldmatrix, {from, 0, count, transposed, {}}, __builtin_return_address(0));
}

void emulator_stmatrix(int count, bool transposed, void* row, EmulatorFragment fragment) {
    matrices(Op::stmatrix, {static_cast<char*>(row), 0, count, transposed, fragment}, __builtin_return_address(0));
}
