// What the lanes of a warp do together. Every lane brings its operands; the last to arrive computes for all.
#include "emulator/machine.h"
#include "emulator/runtime.h"

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

static void shuffle(Warp& warp, uint32_t lanes) {
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

static void ballot(Warp& warp, uint32_t lanes) {
    uint32_t votes = 0;
    for_each_lane(lanes, [&](int lane) { votes |= uint32_t(operand<Ballot>(warp, lane).predicate) << lane; });
    for_each_lane(lanes, [&](int lane) { operand<Ballot>(warp, lane).result = votes; });
}

struct Match {
    uint64_t value;
    uint32_t result;
};

static void match_any(Warp& warp, uint32_t lanes) {
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
static void reduce(Warp& warp, uint32_t lanes) {
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

}  // namespace emulator

using namespace emulator;

void emulator_syncwarp(uint32_t mask) {
    Worker& worker = *current_worker;
    worker.collective({Op::syncwarp, mask, worker.pc(__builtin_return_address(0)), nullptr}, nullptr);
}

uint64_t emulator_shuffle(EmulatorShuffle kind, uint32_t mask, uint64_t value, unsigned bytes, int operand, int width) {
    Worker& worker = *current_worker;
    Shuffle mine{value, shuffle_source(kind, worker.lane(), operand, width), 0};
    Collective collective{Op::shuffle, mask, worker.pc(__builtin_return_address(0)), shuffle};
    collective.instructions = static_cast<int>(bytes / 4);
    collective.bytes = bytes;
    worker.collective(collective, &mine);
    return mine.result;
}

uint32_t emulator_ballot(uint32_t mask, bool predicate) {
    Worker& worker = *current_worker;
    Ballot mine{predicate, 0};
    worker.collective({Op::vote, mask, worker.pc(__builtin_return_address(0)), ballot}, &mine);
    return mine.result;
}

uint32_t emulator_match_any(uint32_t mask, uint64_t value) {
    Worker& worker = *current_worker;
    Match mine{value, 0};
    worker.collective({Op::match, mask, worker.pc(__builtin_return_address(0)), match_any}, &mine);
    return mine.result;
}

uint32_t emulator_reduce(EmulatorReduce kind, uint32_t mask, uint32_t value) {
    static const Perform performs[] = {
        reduce<Add>,           reduce<Min<int32_t>>, reduce<Max<int32_t>>, reduce<Min<uint32_t>>,
        reduce<Max<uint32_t>>, reduce<And>,          reduce<Or>,           reduce<Xor>};
    Worker& worker = *current_worker;
    Reduce mine{value, 0};
    worker.collective({Op::reduce, mask, worker.pc(__builtin_return_address(0)), performs[kind]}, &mine);
    return mine.result;
}
