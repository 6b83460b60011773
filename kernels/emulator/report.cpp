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

template <class Range>
static std::string list(const Range& values) {
    std::string json = "[";
    for (const auto& value : values) {
        if (json.size() > 1) json += ',';
        json += std::to_string(value);
    }
    return json + ']';
}

static std::string field(const char* name, const std::string& json) { return quoted(name) + ':' + json; }
static std::string field(const char* name, uint64_t value) { return field(name, std::to_string(value)); }

static std::string to_json(uint32_t pc, Op op, const Site& site) {
    return '{' + field("pc", pc) + ',' + field("op", quoted(name(op))) + ',' + field("bytes", site.bytes) + ',' +
           field("requests", site.requests) + ',' + field("lanes", site.lanes) + ',' + field("sectors", site.sectors) +
           ',' + field("wavefronts", site.wavefronts) + ',' + field("ideal", site.ideal) + '}';
}

static std::string to_json(const Finding& finding) {
    return '{' + field("kind", quoted(name(finding.kind))) + ',' + field("space", quoted(finding.space)) + ',' +
           field("block", list(finding.block)) + ',' + field("threads", list(finding.threads)) + ',' +
           field("pcs", list(finding.pcs)) + ',' + field("offset", finding.offset) + ',' +
           field("buffer", quoted(finding.buffer)) + ',' + field("bytes", finding.bytes) + ',' +
           field("count", finding.count) + ',' + field("detail", quoted(finding.detail)) + '}';
}

static std::string to_json(const LaunchRecord& launch) {
    char seconds[32];
    snprintf(seconds, sizeof seconds, "%.6f", launch.seconds);
    std::string json = '{' + field("module", quoted(launch.module)) + ',' + field("kernel", launch.kernel) + ',' +
                       field("instrumented", launch.instrumented ? "true" : "false") + ',' +
                       field("grid", list(launch.grid)) + ',' + field("block", list(launch.block)) + ',' +
                       field("shared_bytes", launch.shared_bytes) + ',' + field("blocks_total", launch.blocks_total) +
                       ',' + field("blocks_run", launch.blocks_run) + ',' + field("seconds", std::string(seconds)) +
                       ",\"sites\":[";
    const char* separator = "";
    for (const auto& [key, site] : launch.sites) {
        json += separator + to_json(key.first, key.second, site);
        separator = ",";
    }
    json += "],\"findings\":[";
    separator = "";
    for (const auto& [key, finding] : launch.findings.all()) {
        json += separator + to_json(finding);
        separator = ",";
    }
    return json + "]}";
}

std::string to_json(const std::vector<LaunchRecord>& launches) {
    std::string json = "{\"launches\":[";
    const char* separator = "";
    for (const LaunchRecord& launch : launches) {
        json += separator + to_json(launch);
        separator = ",";
    }
    return json + "]}";
}

}  // namespace emulator
