#include "emulator/report.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <set>
#include <utility>

namespace emulator {

const char* name(Op op) {
    static const char* const names[] = {
        "global_load", "global_store", "shared_load", "shared_store", "ldmatrix", "stmatrix", "cp_async", "atomic",
        "shuffle",     "vote",         "match",       "reduce",       "mma",      "barrier",  "syncwarp", "fence"};
    return names[static_cast<int>(op)];
}

const char* name(Kind kind) {
    static const char* const names[] = {"race",       "uninitialized", "out_of_bounds",        "write_to_input",
                                        "misaligned", "missing_wait",  "divergent_barrier",    "warp_mask",
                                        "deadlock",   "crash",         "shared_memory_budget", "invalid_launch",
                                        "cancelled"};
    return names[static_cast<int>(kind)];
}

void Site::add(const Site& other) {
    requests += other.requests;
    lanes += other.lanes;
    sectors += other.sectors;
    reads += other.reads;
    read_bytes += other.read_bytes;
    wavefronts += other.wavefronts;
    ideal += other.ideal;
    bytes = other.bytes;
}

Finding* Findings::occurred(Kind kind, uint32_t first_pc, uint32_t second_pc) {
    // Which of two racing accesses came first is chance: either order is the same race.
    if (kind == Kind::race && second_pc < first_pc) std::swap(first_pc, second_pc);
    auto [entry, is_new] = findings_.try_emplace({kind, first_pc, second_pc}, Finding());
    Finding& finding = entry->second;
    if (finding.count++ > 0) return nullptr;
    finding.kind = kind;
    return &finding;
}

void Findings::merge(const Findings& other) {
    for (const auto& [key, theirs] : other.findings_) {
        auto [entry, is_new] = findings_.try_emplace(key, theirs);
        if (is_new) continue;
        Finding& ours = entry->second;
        const uint64_t count = ours.count + theirs.count;
        const bool lower = std::lexicographical_compare(std::rbegin(theirs.block), std::rend(theirs.block),
                                                        std::rbegin(ours.block), std::rend(ours.block));
        if (lower) ours = theirs;
        ours.count = count;
    }
}

void Findings::drop_what_races_explain() {
    std::set<uint32_t> racing;
    for (const auto& [key, finding] : findings_)
        if (finding.kind == Kind::race) racing.insert(finding.pcs.begin(), finding.pcs.end());
    for (auto entry = findings_.begin(); entry != findings_.end();) {
        const Finding& finding = entry->second;
        const bool explained = finding.kind == Kind::uninitialized && racing.count(finding.pcs[0]) > 0;
        entry = explained ? findings_.erase(entry) : std::next(entry);
    }
}

// ---- JSON

static std::string quoted(const std::string& text) {
    std::string json = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\') {
            json += '\\';
            json += c;
        } else if (static_cast<unsigned char>(c) < 0x20) {
            char escape[8];
            snprintf(escape, sizeof escape, "\\u%04x", c);
            json += escape;
        } else {
            json += c;
        }
    }
    return json + '"';
}

template <class Range, class ToJson>
static std::string list(const Range& values, ToJson to_json) {
    std::string json;
    for (const auto& value : values) json += (json.empty() ? "" : ",") + to_json(value);
    return '[' + json + ']';
}

template <class Range>
static std::string numbers(const Range& values) {
    return list(values, [](auto value) { return std::to_string(value); });
}

static std::string object(const std::vector<std::pair<const char*, std::string>>& fields) {
    std::string json;
    for (const auto& [name, value] : fields) json += (json.empty() ? "" : ",") + quoted(name) + ':' + value;
    return '{' + json + '}';
}

static std::string to_json(const Sites::value_type& entry) {
    const auto& [instruction, site] = entry;
    return object({{"pc", std::to_string(instruction.first)},
                   {"op", quoted(name(instruction.second))},
                   {"bytes", std::to_string(site.bytes)},
                   {"requests", std::to_string(site.requests)},
                   {"lanes", std::to_string(site.lanes)},
                   {"sectors", std::to_string(site.sectors)},
                   {"reads", std::to_string(site.reads)},
                   {"read_bytes", std::to_string(site.read_bytes)},
                   {"wavefronts", std::to_string(site.wavefronts)},
                   {"ideal", std::to_string(site.ideal)}});
}

static std::string to_json(const Finding& finding) {
    return object({{"kind", quoted(name(finding.kind))},
                   {"space", quoted(finding.space)},
                   {"block", numbers(finding.block)},
                   {"threads", numbers(finding.threads)},
                   {"pcs", numbers(finding.pcs)},
                   {"offset", std::to_string(finding.offset)},
                   {"buffer", quoted(finding.buffer)},
                   {"bytes", std::to_string(finding.bytes)},
                   {"count", std::to_string(finding.count)},
                   {"detail", quoted(finding.detail)}});
}

static std::string to_json(const LaunchRecord& launch) {
    return object({{"module", quoted(launch.module)},
                   {"kernel", std::to_string(launch.kernel)},
                   {"instrumented", launch.instrumented ? "true" : "false"},
                   {"grid", numbers(launch.grid)},
                   {"block", numbers(launch.block)},
                   {"shared_bytes", std::to_string(launch.shared_bytes)},
                   {"blocks_total", std::to_string(launch.blocks_total)},
                   {"blocks_run", std::to_string(launch.blocks_run)},
                   {"seconds", std::to_string(launch.seconds)},
                   {"sites", list(launch.sites, [](const auto& entry) { return to_json(entry); })},
                   {"findings", list(launch.findings.all(), [](const auto& entry) { return to_json(entry.second); })}});
}

std::string to_json(const std::vector<LaunchRecord>& launches) {
    return object({{"launches", list(launches, [](const LaunchRecord& launch) { return to_json(launch); })}});
}

}  // namespace emulator
