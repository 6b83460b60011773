// Runs a block: which thread is next, who waits for whom, and what it means when nobody can go on.
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "emulator/faults.h"
#include "emulator/machine.h"
#include "emulator/runtime.h"
#include "emulator/trace.h"

namespace emulator {

thread_local Worker* current_worker = nullptr;

/// The first set bit after `index`, else the first one: round robin.
static int next_bit(uint32_t bits, int index) {
    const uint32_t after = bits & ~((uint32_t(2) << index) - 1);
    return __builtin_ctz(after != 0 ? after : bits);
}

Worker::Worker() {
    void* memory = mmap(nullptr, kMaxSharedBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    shared_.dynamic_begin = static_cast<char*>(memory);
}

Worker::~Worker() { munmap(shared_.dynamic_begin, kMaxSharedBytes); }

void Worker::run(Launch& launch) {
    launch_ = &launch;
    findings_ = Findings();
    std::fill(std::begin(recent_buffers_), std::end(recent_buffers_), nullptr);
    stacks_.reserve(launch.threads);
    shared_.static_begin = launch.module.static_shared();
    shared_.static_bytes = launch.module.tls_bytes;
    shared_.dynamic_bytes = launch.dynamic_bytes;
    threads_.resize(static_cast<size_t>(launch.threads));
    warps_.resize(static_cast<size_t>((launch.threads + kWarpSize - 1) / kWarpSize));
    trace_ = nullptr;
    if (launch.instrumented) {
        if (kept_trace_ == nullptr) kept_trace_ = std::make_unique<Trace>(*this);
        trace_ = kept_trace_.get();
        trace_->start_launch();
    }
    const HandlerStack handler_stack;
    current_worker = this;
    while (!launch.stop) {
        const uint64_t block = launch.next_block++;
        if (block >= launch.blocks) break;
        run_block(block);
        if (!abandoned_) launch.blocks_done++;
    }
    current_worker = nullptr;
    launch_ = nullptr;
}

Sites Worker::take_sites() { return trace_ != nullptr ? trace_->sites() : Sites(); }

void Worker::run_block(uint64_t block) {
    coordinates(block, launch_->grid, block_);
    block_id_ = launch_->first_block_id + static_cast<uint32_t>(block);
    // Bytes that nobody wrote read as NaN, whatever the floating-point type.
    if (shared_.static_bytes > 0) memset(shared_.static_begin, 0xff, shared_.static_bytes);
    memset(shared_.dynamic_begin, 0xff, shared_.dynamic_bytes);
    start_threads();
    if (trace_ != nullptr) trace_->start_block();
    on_a_fiber_ = true;
    switch_context(main_, resume(&threads_[0]));
    on_a_fiber_ = false;
    if (crash_.signal != 0) report_crash();
    if (trace_ != nullptr) trace_->end_block();
    if (abandoned_) {
        launch_->stop = true;
    } else if (finished_ < threads_.size() && !launch_->stop) {
        report_deadlock();
        launch_->stop = abandoned_ = true;
    } else if (finished_ < threads_.size()) {
        abandoned_ = true;
    }
}

void Worker::start_threads() {
    finished_ = 0;
    abandoned_ = false;
    current_warp_ = 0;
    ready_warps_ = 0;
    block_barrier_ = BlockBarrier();
    for (NamedBarrier& barrier : named_barriers_) barrier = NamedBarrier();
    const int count = launch_->threads;
    for (int w = 0; w < static_cast<int>(warps_.size()); ++w) {
        Warp& warp = warps_[static_cast<size_t>(w)];
        const int lanes = count - w * kWarpSize;
        warp.number = w;
        warp.exists = lanes >= kWarpSize ? ~uint32_t(0) : bit(lanes) - 1;
        warp.alive = warp.exists;
        warp.ready = warp.full = 0;
        warp.open.clear();
        make_ready(warp, warp.exists);
    }
    for (int t = 0; t < count; ++t) {
        Thread& thread = threads_[static_cast<size_t>(t)];
        thread.number = t;
        coordinates(static_cast<uint64_t>(t), launch_->block, thread.index);
        thread.copies.clear();
        thread.groups.clear();
        thread.committed = 0;
        start_context(thread.context, stacks_.top(t), thread_main);
    }
}

void Worker::thread_main() {
    Worker& worker = *current_worker;
    worker.launch_->thread(worker.launch_->argument);
    worker.finish_thread();
}

void Worker::finish_thread() {
    Warp& warp = this->warp();
    warp.alive &= ~bit(lane());
    warp.ready &= ~bit(lane());
    ++finished_;
    // Those who wait for everyone alive need not wait for this thread any more.
    complete_if_arrived(warp);
    release_block_barrier();
    Context never_resumed;
    switch_context(never_resumed, resume(next_ready()));
}

// ---- taking turns

Thread* Worker::next_ready() {
    int after = running_->number % kWarpSize;
    for (;;) {
        Warp& warp = warps_[static_cast<size_t>(current_warp_)];
        if (warp.ready != 0)
            return &threads_[static_cast<size_t>(current_warp_ * kWarpSize + next_bit(warp.ready, after))];
        // The warp has come as far as it can.
        if (trace_ != nullptr) {
            trace_->drain(warp, kAllLanes);
            warp.ready = std::exchange(warp.full, 0);
            if (warp.ready != 0) continue;
        }
        // Those who wait for whoever is there may be spinning on a lock: the other warps are next.
        if (warp.open.empty() || !complete_whoever_is_there(warp)) ready_warps_ &= ~bit(current_warp_);
        if (ready_warps_ == 0 || launch_->stop.load(std::memory_order_relaxed)) return nullptr;
        current_warp_ = next_bit(ready_warps_, current_warp_);
        after = kWarpSize - 1;
    }
}

Context& Worker::resume(Thread* thread) {
    if (thread == nullptr) return main_;
    running_ = thread;
    return thread->context;
}

void Worker::suspend() {
    Context& context = running_->context;
    warp().ready &= ~bit(lane());
    Context& next = resume(next_ready());
    if (&next != &context) switch_context(context, next);  // else what it waited for has come in the meantime
}

void Worker::wait_for_drain() {
    warp().full |= bit(lane());
    suspend();
}

void Worker::stop_if_cancelled() {
    if (launch_->stop.load(std::memory_order_relaxed)) abandon();
}

void Worker::make_ready(Warp& warp, uint32_t lanes) {
    warp.ready |= lanes;
    ready_warps_ |= bit(warp.number);
}

void Worker::abandon() {
    abandoned_ = true;
    Context never_resumed;
    switch_context(never_resumed, main_);
    __builtin_unreachable();
}

// ---- warp collectives

void Worker::collective(const Collective& wanted, void* operands) {
    stop_if_cancelled();
    Warp& warp = this->warp();
    const uint32_t me = bit(lane());
    uint32_t mask = wanted.mask;
    if (mask != kWhoeverIsThere && (mask & me) == 0) {
        mask |= me;
        if (Finding* finding = occurred(Kind::warp_mask, wanted.pc)) {
            finding->threads = {running_->number};
            finding->detail = std::string("lane ") + std::to_string(lane()) + " takes part in a " + name(wanted.op) +
                              " whose mask does not name it";
        }
    }
    warp.operands[lane()] = operands;
    size_t i = 0;
    const auto is_wanted = [&](const Collective& open) {
        return open.mask == mask && open.op == wanted.op && open.perform == wanted.perform &&
               (open.arrived & me) == 0 && (mask != kWhoeverIsThere || open.pc == wanted.pc);
    };
    while (i < warp.open.size() && !is_wanted(warp.open[i])) ++i;
    if (i == warp.open.size()) {
        warp.open.push_back(wanted);
        warp.open[i].mask = mask;
    }
    warp.open[i].arrived |= me;
    if (mask != kWhoeverIsThere && (mask & warp.alive & ~warp.open[i].arrived) == 0) return complete(warp, i);
    running_->wait_op = wanted.op;
    running_->wait_pc = wanted.pc;
    suspend();
}

void Worker::complete(Warp& warp, size_t open_index) {
    const Collective collective = warp.open[open_index];
    warp.open.erase(warp.open.begin() + static_cast<std::ptrdiff_t>(open_index));
    if (trace_ != nullptr) {
        trace_->drain(warp, collective.arrived);
        trace_->count(collective);
        if (collective.op == Op::syncwarp) trace_->races.order_warp(warp, collective.arrived);
    }
    if (collective.perform != nullptr) collective.perform(warp, collective);
    make_ready(warp, collective.arrived);
}

void Worker::complete_if_arrived(Warp& warp) {
    for (size_t i = warp.open.size(); i-- > 0;) {
        const Collective& open = warp.open[i];
        if (open.mask != kWhoeverIsThere && (open.mask & warp.alive & ~open.arrived) == 0) complete(warp, i);
    }
}

bool Worker::complete_whoever_is_there(Warp& warp) {
    const size_t before = warp.open.size();
    for (size_t i = before; i-- > 0;)
        if (warp.open[i].mask == kWhoeverIsThere) complete(warp, i);
    return warp.open.size() < before;
}

// ---- barriers

void Worker::block_barrier(const char* file, int line, uint32_t pc) {
    stop_if_cancelled();
    BlockBarrier& barrier = block_barrier_;
    const int thread = running_->number;
    if (barrier.arrived == 0) {
        barrier.file = file;
        barrier.line = line;
        barrier.pc = pc;
        barrier.thread = thread;
    } else if (barrier.line != line || strcmp(barrier.file, file) != 0) {
        if (Finding* finding = occurred(Kind::divergent_barrier, barrier.pc, pc)) {
            finding->threads = {barrier.thread, thread};
            finding->detail = "threads of one block wait at different __syncthreads()";
        }
    }
    ++barrier.arrived;
    barrier.waiting[thread / kWarpSize] |= bit(thread % kWarpSize);
    running_->wait_op = Op::barrier;
    running_->wait_pc = pc;
    warp().ready &= ~bit(lane());
    release_block_barrier();
    if ((warp().ready & bit(lane())) == 0) suspend();
}

/// Lets __syncthreads pass if every live thread has arrived.
void Worker::release_block_barrier() {
    if (block_barrier_.arrived == 0 || block_barrier_.arrived + finished_ < threads_.size()) return;
    const BlockBarrier barrier = std::exchange(block_barrier_, BlockBarrier());
    if (trace_ != nullptr) {
        trace_->drain(warp(), kAllLanes);
        Site& site = trace_->site(barrier.pc, Op::barrier);
        for (uint32_t lanes : barrier.waiting) site.requests += lanes != 0;
        site.lanes += barrier.arrived;
        trace_->races.order_block();
    }
    wake(barrier.waiting);
}

void Worker::wake(const uint32_t (&lanes)[kMaxWarps]) {
    for (Warp& warp : warps_)
        if (lanes[warp.number] != 0) make_ready(warp, lanes[warp.number]);
}

namespace {
struct Arrival {
    int id;
    unsigned threads;
    bool wait;
};
}  // namespace

void Worker::named_barrier(int id, unsigned threads, bool wait, uint32_t pc) {
    if (id < 0 || id >= kBarriers || threads == 0 || threads % kWarpSize != 0) {
        if (Finding* finding = occurred(Kind::crash, pc)) {
            finding->threads = {running_->number};
            finding->detail = "barrier " + std::to_string(id) + " for " + std::to_string(threads) +
                              " threads: there are " + std::to_string(kBarriers) + " barriers, for whole warps";
        }
        abandon();
    }
    NamedBarrier& barrier = named_barriers_[id];
    const unsigned generation = barrier.generation;
    // The warp arrives as one, and then each of its lanes waits.
    Arrival mine{id, threads, wait};
    const Perform arrive = [](Warp& warp, const Collective& collective) {
        const auto& theirs = *static_cast<Arrival*>(warp.operands[__builtin_ctz(collective.arrived)]);
        current_worker->arrive(warp, theirs.id, theirs.threads, theirs.wait);
    };
    collective({Op::barrier, ~uint32_t(0), pc, arrive}, &mine);
    while (wait && barrier.generation == generation) {
        barrier.waiting[warp().number] |= bit(lane());
        running_->wait_op = Op::barrier;
        running_->wait_pc = pc;
        suspend();
    }
}

void Worker::arrive(Warp& warp, int id, unsigned threads, bool wait) {
    NamedBarrier& barrier = named_barriers_[id];
    barrier.arrived += kWarpSize;
    if (wait) barrier.waiting_warps |= bit(warp.number);
    if (trace_ != nullptr) trace_->races.publish(warp.number, barrier.published);
    if (barrier.arrived < threads) return;
    const NamedBarrier passed = std::exchange(barrier, NamedBarrier());
    barrier.generation = passed.generation + 1;
    if (trace_ != nullptr)
        for (int waiting : each(passed.waiting_warps)) trace_->races.learn(waiting, passed.published);
    wake(passed.waiting);
}

// ---- findings

Finding* Worker::occurred(Kind kind, uint32_t first_pc, uint32_t second_pc) {
    Finding* finding = findings_.occurred(kind, first_pc, second_pc);
    if (finding == nullptr) return nullptr;
    memcpy(finding->block, block_, sizeof block_);
    if (first_pc != 0) finding->pcs.push_back(first_pc);
    if (second_pc != 0) finding->pcs.push_back(second_pc);
    return finding;
}

void Worker::crash(int signal, const void* address, uintptr_t kernel_address) {
    crash_ = {signal, address, kernel_address};
    abandon();
}

void Worker::report_crash() {
    const int signal = std::exchange(crash_.signal, 0);
    const uint32_t pc = crash_.kernel_address == 0 ? 0 : this->pc(reinterpret_cast<void*>(crash_.kernel_address));
    Finding* finding = occurred(Kind::crash, pc);
    if (finding == nullptr) return;
    finding->threads = {running_->number};
    char address[32];
    snprintf(address, sizeof address, "0x%zx", reinterpret_cast<uintptr_t>(crash_.address));
    if (signal == SIGFPE)
        finding->detail = "integer division by zero";
    else if (stacks_.in_guard_page(crash_.address))
        finding->detail = "stack overflow: a thread has " + std::to_string(Stacks::kBytes / 1024) + " KiB";
    else if (signal == SIGABRT)
        finding->detail = "a failed assert, an exception that nobody catches, or abort()";
    else if (signal == SIGILL)
        finding->detail = "__trap() or an instruction that this machine does not have";
    else
        finding->detail = std::string("an access to address ") + address + ", where no memory is";
}

void Worker::report_deadlock() {
    Finding* finding = occurred(Kind::deadlock);
    if (finding == nullptr) return;
    std::map<std::pair<Op, uint32_t>, int> waiting;  // how many threads wait there
    for (const Thread& thread : threads_) {
        const Warp& warp = warps_[static_cast<size_t>(thread.number / kWarpSize)];
        if (!(warp.alive & bit(thread.number % kWarpSize))) continue;
        if (waiting[{thread.wait_op, thread.wait_pc}]++ > 0) continue;
        finding->threads.push_back(thread.number);
        finding->pcs.push_back(thread.wait_pc);
    }
    std::string detail = "nobody can go on:";
    for (const auto& [where, count] : waiting)
        detail += ' ' + std::to_string(count) + " wait in a " + name(where.first) + ',';
    finding->detail = detail + ' ' + std::to_string(finished_) + " have returned";
}

}  // namespace emulator

// ---- what kernel code calls

using emulator::current_worker;
using emulator::Worker;

unsigned emulator_thread_index(int axis) { return current_worker->running().index[axis]; }
unsigned emulator_block_index(int axis) { return current_worker->block()[axis]; }
unsigned emulator_block_size(int axis) { return current_worker->launch().block[axis]; }
unsigned emulator_grid_size(int axis) { return current_worker->launch().grid[axis]; }
void* emulator_dynamic_shared() { return current_worker->shared().dynamic_begin; }

void emulator_barrier(int id, unsigned threads, bool wait, const char* file, int line) {
    Worker& worker = *current_worker;
    const uint32_t pc = worker.pc(__builtin_return_address(0));
    if (line != 0)
        worker.block_barrier(file, line, pc);
    else
        worker.named_barrier(id, threads, wait, pc);
}
