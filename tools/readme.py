"""Writes the tables of README.md and kernels/README.md anew: `make docs`.

What stands between `<!-- generated: NAME -->` and `<!-- end -->` in README.md is what the function NAME here returns,
from flash_tutorial/versions.py, a run in the emulator, or results/. tests/test_readme.py checks that it is current.
"""

import re
from itertools import groupby
from pathlib import Path

from flash_tutorial import benchmark
from flash_tutorial.compare import compare
from flash_tutorial.problem import Problem
from flash_tutorial.versions import VERSIONS, write_readme

ROOT = Path(__file__).resolve().parents[1]
DEMO = (ROOT / "tests" / "data" / "minilm_qkv.safetensors", "layer3")  # what `make demo` compares on


def table(headers: list[str], rows: list[list[str]], align: str) -> str:
    """A Markdown table without padding; `align` has an l or r for each column."""
    rule = ["---:" if side == "r" else "---" for side in align]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headers, rule, *rows))


def ladder() -> str:
    """Every version: its kernel, its idea and its notebook."""
    rows = [[f"[{v.name}](kernels/{v.name}.cu)", v.idea, f"[notebook](notebooks/{v.name}.ipynb)"] for v in VERSIONS]
    return table(["version", "idea", ""], rows, "lll")


def counters() -> str:
    """What each version does to memory on the demo's tensors. These are counts: every machine gets the same."""
    problems = [Problem.from_file(*DEMO, dtype=dtype) for dtype in ("float32", "float16")]
    compared = [row for problem in problems for row in compare("all", problem)]
    if wrong := [f"{row.name}: {row.status}: {row.note}" for row in compared if row.status != "right"]:
        raise RuntimeError("; ".join(wrong))
    rows = [
        [
            row.name,
            f"{row.counters.global_load_bytes / 1e6:.2f}",
            f"{row.counters.global_store_bytes / 1e6:.2f}",
            f"{row.counters.shared_load_wavefronts + row.counters.shared_store_wavefronts:,}",
            f"{row.counters.shared_load_conflicts + row.counters.shared_store_conflicts:,}",
            f"{row.counters.barriers:,}",
            f"{row.counters.shuffles:,}",
        ]
        for row in compared
    ]
    headers = [
        *("version", "global loads, MB", "global stores, MB"),
        *("shared wavefronts", "of them bank conflicts", "barriers", "shuffles"),
    ]
    return table(headers, rows, "lrrrrrr")


def speed() -> str:
    """The newest times of every GPU in results/, a table for each family of shapes that differ in length only."""
    rows = benchmark.load_results()
    if not rows:
        return "Times on a GPU: none are stored yet; `python -m flash_tutorial.benchmark` measures and keeps them."

    def family(row: dict) -> tuple:
        return row["gpu"], row["dtype"], row["batch"], row["heads"], row["head_dim"], row["causal"]

    parts = []
    for (gpu, dtype, batch, heads, head_dim, causal), group in groupby(sorted(rows, key=family), key=family):
        members = list(group)
        lengths = sorted({row["seq"] for row in members})
        cells = {(row["version"], row["seq"]): _time(row) for row in members}
        names = sorted({row["version"] for row in members}, key=lambda name: (not _is_version(name), name))
        date = max(row["date"] for row in members)[:10]
        mask = "causal" if causal else "not causal"
        stale = any(row["stale"] for row in members)
        parts.append(
            f"Microseconds, and in brackets TFLOP/s, on {gpu} ({date}): {dtype}, B={batch}, H={heads}, D={head_dim}, "
            f"{mask}. `baseline` and `sdpa_…` are PyTorch."
            + " An asterisk: measured before the kernel's last change."
            * stale
        )
        timed = [[name, *(cells.get((name, length), "") for length in lengths)] for name in names]
        parts.append(table(["", *(f"N={length}" for length in lengths)], timed, "l" + "r" * len(lengths)))
    return "\n\n".join(parts)


def _time(row: dict) -> str:
    if "microseconds" not in row:
        return "wrong"
    return f"{row['microseconds']['median']:,.0f} ({row['tflops']:.1f}){'*' if row['stale'] else ''}"


def _is_version(name: str) -> bool:
    return any(version.name == name for version in VERSIONS)


def filled(text: str) -> str:
    """`text` with every generated part written anew. Raises KeyError for a part that nothing here generates."""
    generators = {"ladder": ladder, "counters": counters, "speed": speed}
    return re.sub(
        r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)",
        lambda part: f"{part[1]}{generators[part[2]]()}\n{part[3]}",
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text()))
    print(f"Wrote {readme} and {write_readme()}")
