// What the lanes of a warp do together. Every lane brings its operands; the last to arrive computes for all.
#include <cstring>

#include "emulator/half.h"
#include "emulator/machine.h"
#include "emulator/runtime.h"
#include "emulator/trace.h"

namespace emulator {

template <class Visit>
static void for_each_lane(uint32_t lanes, Visit visit) {
    for (; lanes != 0; lanes &= lanes - 1) visit(__builtin_ctz(lanes));
}

template <class T>
static T& operand(Warp& warp, int lane) {
    return *static_cast<T*>(warp.operands[lane]);
}

// ---- shuffles

struct Shuffle {
    uint64_t value;
    int source;  // lane
    uint64_t result;
};

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
    const uint32_t lanes = collective.arrived;
    for_each_lane(lanes, [&](int lane) {
        Shuffle& mine = operand<Shuffle>(warp, lane);
        // What a lane that takes no part would give is undefined; here it is NaN.
        mine.result = lanes >> mine.source & 1 ? operand<Shuffle>(warp, mine.source).value : ~uint64_t(0);
    });
}

// ---- votes, matches, reductions

struct Ballot {
    bool predicate;
    uint32_t result;
};

static void ballot(Warp& warp, const Collective& collective) {
    const uint32_t lanes = collective.arrived;
    uint32_t votes = 0;
    for_each_lane(lanes, [&](int lane) { votes |= uint32_t(operand<Ballot>(warp, lane).predicate) << lane; });
    for_each_lane(lanes, [&](int lane) { operand<Ballot>(warp, lane).result = votes; });
}

struct Match {
    uint64_t value;
    uint32_t result;
};

static void match_any(Warp& warp, const Collective& collective) {
    const uint32_t lanes = collective.arrived;
    for_each_lane(lanes, [&](int lane) {
        Match& mine = operand<Match>(warp, lane);
        mine.result = 0;
        for_each_lane(lanes, [&](int other) {
            mine.result |= uint32_t(operand<Match>(warp, other).value == mine.value) << other;
        });
    });
}

struct Reduce {
    uint32_t value;
    uint32_t result;
};

template <class Combine>
static void reduce(Warp& warp, const Collective& collective) {
    const uint32_t lanes = collective.arrived;
    uint32_t result = operand<Reduce>(warp, __builtin_ctz(lanes)).value;
    for_each_lane(lanes & (lanes - 1),
                  [&](int lane) { result = Combine()(result, operand<Reduce>(warp, lane).value); });
    for_each_lane(lanes, [&](int lane) { operand<Reduce>(warp, lane).result = result; });
}

struct Add {
    uint32_t operator()(uint32_t a, uint32_t b) const { return a + b; }
};
template <class T>
struct Min {
    uint32_t operator()(uint32_t a, uint32_t b) const { return static_cast<T>(b) < static_cast<T>(a) ? b : a; }
};
template <class T>
struct Max {
    uint32_t operator()(uint32_t a, uint32_t b) const { return static_cast<T>(a) < static_cast<T>(b) ? b : a; }
};
struct And {
    uint32_t operator()(uint32_t a, uint32_t b) const { return a & b; }
};
struct Or {
    uint32_t operator()(uint32_t a, uint32_t b) const { return a | b; }
};
struct Xor {
    uint32_t operator()(uint32_t a, uint32_t b) const { return a ^ b; }
};

static void active_mask(Warp& warp, const Collective& collective) {
    for_each_lane(collective.arrived, [&](int lane) { operand<uint32_t>(warp, lane) = collective.arrived; });
}

// ---- matrices

/// Matrices take all 32 lanes. If some have returned, the instruction is reported and left undone.
static bool whole_warp(const Warp& warp, const Collective& collective) {
    if (collective.arrived == ~uint32_t(0)) return true;
    if (Finding* finding = current_worker->occurred(Kind::divergent_barrier, collective.pc)) {
        finding->threads = {warp.number * kWarpSize + __builtin_ctz(collective.arrived)};
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

template <bool BFLOAT16>
static void mma(Warp& warp, const Collective& collective) {
    if (!whole_warp(warp, collective)) return;
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < kWarpSize; ++lane) {
        const Mma& mine = operand<Mma>(warp, lane);
        const int group = lane / 4, pair = lane % 4 * 2;
        for (int half = 0; half < 2; ++half) {
            for (int i = 0; i < 4; ++i)
                a[group + i % 2 * 8][pair + i / 2 * 8 + half] = element<BFLOAT16>(mine.a.r[i], half);
            for (int i = 0; i < 2; ++i) b[pair + i * 8 + half][group] = element<BFLOAT16>(mine.b[i], half);
        }
        for (int i = 0; i < 4; ++i) d[group + i / 2 * 8][pair + i % 2] = mine.d.r[i];
    }
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k)
            for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < kWarpSize; ++lane) {
        const int group = lane / 4, pair = lane % 4 * 2;
        for (int i = 0; i < 4; ++i) operand<Mma>(warp, lane).d.r[i] = d[group + i / 2 * 8][pair + i % 2];
    }
}

/// ldmatrix, stmatrix. The comment in flash/ptx/ldmatrix.cuh says which lane holds what.
struct Matrices {
    char* row;
    int count;
    bool transposed;
    EmulatorFragment fragment;
};

static void trace_matrices(Warp& warp, const Collective& collective, int count) {
    Trace* trace = current_worker->trace();
    if (trace == nullptr) return;
    uint64_t rows[kWarpSize];
    for (int lane = 0; lane < 8 * count; ++lane)
        rows[lane] = reinterpret_cast<uintptr_t>(operand<Matrices>(warp, lane).row);
    trace->matrices(warp, collective, rows, count);
}

/// Calls visit(lane, register, low element, high element) for what every lane holds of `count` matrices.
template <class Visit>
static void for_each_pair(Warp& warp, int count, bool transposed, Visit visit) {
    for (int matrix = 0; matrix < count; ++matrix) {
        char* rows[8];
        for (int row = 0; row < 8; ++row) rows[row] = operand<Matrices>(warp, 8 * matrix + row).row;
        for (int lane = 0; lane < kWarpSize; ++lane) {
            const int major = lane / 4, minor = lane % 4 * 2;
            char* low = transposed ? rows[minor] + 2 * major : rows[major] + 2 * minor;
            char* high = transposed ? rows[minor + 1] + 2 * major : low + 2;
            visit(operand<Matrices>(warp, lane).fragment.r[matrix], low, high);
        }
    }
}

static void load_matrices(Warp& warp, const Collective& collective) {
    if (!whole_warp(warp, collective)) return;
    const int count = operand<Matrices>(warp, 0).count;
    trace_matrices(warp, collective, count);
    for_each_pair(warp, count, operand<Matrices>(warp, 0).transposed, [](uint32_t& pair, char* low, char* high) {
        uint16_t halves[2];
        memcpy(&halves[0], low, 2);
        memcpy(&halves[1], high, 2);
        pair = halves[0] | uint32_t(halves[1]) << 16;
    });
}

static void store_matrices(Warp& warp, const Collective& collective) {
    if (!whole_warp(warp, collective)) return;
    const int count = operand<Matrices>(warp, 0).count;
    trace_matrices(warp, collective, count);
    for_each_pair(warp, count, operand<Matrices>(warp, 0).transposed, [](uint32_t& pair, char* low, char* high) {
        const uint16_t halves[2] = {static_cast<uint16_t>(pair), static_cast<uint16_t>(pair >> 16)};
        memcpy(low, &halves[0], 2);
        memcpy(high, &halves[1], 2);
    });
}

/// The part of ldmatrix and stmatrix that they have in common.
static EmulatorFragment move_matrices(Op op, Perform perform, int count, bool transposed, const void* row,
                                      EmulatorFragment fragment, const void* return_address) {
    Worker& worker = *current_worker;
    Matrices mine{const_cast<char*>(static_cast<const char*>(row)), count, transposed, fragment};
    const uint32_t pc = worker.enter(return_address);
    if (worker.trace() != nullptr && worker.lane() < 8 * count)
        worker.trace()->check_shared(reinterpret_cast<uintptr_t>(row), 16, op == Op::stmatrix, pc);
    Collective collective{op, ~uint32_t(0), pc, perform};
    collective.bytes = 16;
    worker.collective(collective, &mine);
    return mine.fragment;
}

}  // namespace emulator

using namespace emulator;

void emulator_syncwarp(uint32_t mask) {
    Worker& worker = *current_worker;
    worker.collective({Op::syncwarp, mask, worker.enter(__builtin_return_address(0)), nullptr}, nullptr);
}

uint64_t emulator_shuffle(EmulatorShuffle kind, uint32_t mask, uint64_t value, unsigned bytes, int operand, int width) {
    Worker& worker = *current_worker;
    Shuffle mine{value, shuffle_source(kind, worker.lane(), operand, width), 0};
    Collective collective{Op::shuffle, mask, worker.enter(__builtin_return_address(0)), shuffle};
    collective.instructions = static_cast<int>(bytes / 4);
    collective.bytes = bytes;
    worker.collective(collective, &mine);
    return mine.result;
}

uint32_t emulator_ballot(uint32_t mask, bool predicate) {
    Worker& worker = *current_worker;
    Ballot mine{predicate, 0};
    worker.collective({Op::vote, mask, worker.enter(__builtin_return_address(0)), ballot}, &mine);
    return mine.result;
}

uint32_t emulator_match_any(uint32_t mask, uint64_t value) {
    Worker& worker = *current_worker;
    Match mine{value, 0};
    worker.collective({Op::match, mask, worker.enter(__builtin_return_address(0)), match_any}, &mine);
    return mine.result;
}

uint32_t emulator_reduce(EmulatorReduce kind, uint32_t mask, uint32_t value) {
    static const Perform performs[] = {
        reduce<Add>,           reduce<Min<int32_t>>, reduce<Max<int32_t>>, reduce<Min<uint32_t>>,
        reduce<Max<uint32_t>>, reduce<And>,          reduce<Or>,           reduce<Xor>};
    Worker& worker = *current_worker;
    Reduce mine{value, 0};
    worker.collective({Op::reduce, mask, worker.enter(__builtin_return_address(0)), performs[kind]}, &mine);
    return mine.result;
}

uint32_t emulator_active_mask() {
    Worker& worker = *current_worker;
    uint32_t lanes = 0;
    worker.collective({Op::vote, kWhoeverIsThere, worker.enter(__builtin_return_address(0)), active_mask}, &lanes);
    return lanes;
}

EmulatorAccumulator emulator_mma_m16n8k16(bool bfloat16, EmulatorFragment a, uint32_t b0, uint32_t b1,
                                          EmulatorAccumulator c) {
    Worker& worker = *current_worker;
    Mma mine{a, {b0, b1}, c};
    const Perform perform = bfloat16 ? mma<true> : mma<false>;
    worker.collective({Op::mma, ~uint32_t(0), worker.enter(__builtin_return_address(0)), perform}, &mine);
    return mine.d;
}

EmulatorFragment emulator_ldmatrix(int matrices, bool transposed, const void* row) {
    return move_matrices(Op::ldmatrix, load_matrices, matrices, transposed, row, {}, __builtin_return_address(0));
}

void emulator_stmatrix(int matrices, bool transposed, void* row, EmulatorFragment fragment) {
    move_matrices(Op::stmatrix, store_matrices, matrices, transposed, row, fragment, __builtin_return_address(0));
}
