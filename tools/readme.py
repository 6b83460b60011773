"""Writes the tables and pictures of README.md, and the tables of the other README files, anew: `make docs`.

What stands between `<!-- generated: NAME -->` and `<!-- end -->` in one of PAGES is what the function NAME here
returns, from flash_tutorial/versions.py, a run in the emulator, or results/. tests/test_readme.py checks that it is
current, and so are the pictures that it shows.
"""

import functools
import re
from pathlib import Path

from flash_tutorial import ablation, benchmark, charts, hardware, standing, timetable
from flash_tutorial.compare import compare
from flash_tutorial.problem import Problem
from flash_tutorial.reference import PEERS
from flash_tutorial.text import markdown
from flash_tutorial.versions import VERSIONS, write_readme

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "kernels" / "emulator" / "README.md")  # that have generated parts
GPU = "h200"  # whose figures the pictures show; the tables have every GPU's
PICTURES = ROOT / "results" / "plots"
SUITES = ("pedagogical", "paper")
DEMO = (ROOT / "tests" / "data" / "minilm_qkv.safetensors", "layer3")  # what `make demo` compares on


def ladder() -> str:
    """Every version: its kernel, its idea and its notebook."""
    rows = [[f"[{v.name}](kernels/{v.name}.cu)", v.idea, f"[notebook](notebooks/{v.name}.ipynb)"] for v in VERSIONS]
    return markdown(["version", "idea", ""], rows, "lll")


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
    return markdown(headers, rows, "lrrrrrr")


def speed() -> str:
    """The newest times of versions and references that results/ holds, of every GPU, on the grids of the suites."""
    parts = []
    for suite in ("pedagogical", "article", "paper"):
        # Where there are several families, those whom one run has measured on all of them.
        plan = standing.plan_of(suite) if suite == standing.FAMILIES else benchmark.plan_of(suite=suite, peers=PEERS)
        tables = timetable.tables_of(benchmark.stored(plan), plan.contenders, plan.baseline)
        for gpu in dict.fromkeys(each.gpu for each in tables):
            parts += _speeds(gpu, [each for each in tables if each.gpu == gpu])
    return "\n\n".join(parts) or "Times on a GPU: none are stored yet; `flash-tutorial bench` measures and keeps them."


def _speeds(gpu: str, families: list[timetable.Table]) -> list[str]:
    """The times of one family by length, or those of several in one table by harmonic mean; each with its caption."""
    rows = [line.row for each in families for line in each.lines]
    where = f"on {gpu} ({max(row['date'] for row in rows)[:10]})"
    stale = " An asterisk: measured before the kernel's last change." * any(row["stale"] for row in rows)
    names = dict.fromkeys(contender.name for each in families for contender in each.contenders)
    if len(families) == 1:
        (family,) = families
        cells = {name: [_time(family.line(name, length)) for length in family.lengths] for name in names}
        headers = [f"N={length}" for length in family.lengths]
        caption = (
            f"Microseconds, and in brackets TFLOP/s, {where}: {family.problem}. `baseline` and `sdpa_…` are PyTorch."
        )
    else:
        cells = {name: [_mean(each, name) for each in families] for name in names}
        headers = [each.lines[0].shape.brief for each in families]
        lengths = families[0].lengths
        caption = (
            f"TFLOP/s {where}: {families[0].lines[0].shape.dtype}, B·N=16,384, H·D=2,048, the harmonic mean over "
            f"N={lengths[0]} to {lengths[-1]:,}."
        )
    timed = [[name, *row] for name, row in cells.items() if any(row)]
    return [caption + stale, markdown(["", *headers], timed, "l" + "r" * len(headers))]


def _time(line: timetable.Line | None) -> str:
    if line is None:
        return ""
    if line.microseconds is None:
        return "wrong"
    return f"{line.microseconds:,.0f} ({line.tflops:.1f}){'*' if line.row['stale'] else ''}"


def _mean(family: timetable.Table, name: str) -> str:
    if name not in family.means:
        return ""
    stale = any(line.row["stale"] for line in family.lines if line.contender.name == name)
    return f"{family.means[name]:.1f}{'*' * stale}"


def standings() -> str:
    """How near the versions come to FlashAttention-2, on every GPU stored and elsewhere."""
    return standing.markdown()


@functools.cache
def pictures() -> dict[Path, charts.Picture]:
    """Every picture of README.md that there are figures for, by its file."""
    makers = {f"speed_{suite}": lambda suite=suite: charts.speeds(suite=suite, gpu=GPU) for suite in SUITES}
    makers["roofline"] = lambda: charts.roofline(gpu=GPU)
    found = {}
    for name, make in makers.items():
        try:
            found[PICTURES / f"{GPU}_{name}.svg"] = make()
        except charts.NothingStored as missing:
            print(f"no picture {name}: {missing}")
    return found


def plots() -> str:
    """The pictures, each with what it shows in words."""
    return "\n\n".join(f"![{picture.alt}]({path.relative_to(ROOT)})" for path, picture in pictures().items())


def ablations() -> str:
    """A table for each version whose variants have times, or figures published elsewhere; the latter unfolded."""
    parts = []
    for found in (ablation.of(version) for version in VERSIONS if version.options):
        if found.elsewhere:
            parts.append(found.markdown())
        elif found.gpu:
            summary = f"<summary>{found.version.name}: {len(found.rows)} variants</summary>"
            parts.append(f"<details>{summary}\n\n{found.markdown()}\n\n</details>")
    return "\n\n".join(parts)


def agreement() -> str:
    """How far the emulator's counters and a GPU's agree."""
    return hardware.agreement(hardware.stored())


def filled(text: str) -> str:
    """`text` with every generated part written anew. Raises KeyError for a part that nothing here generates."""
    every = (ladder, counters, speed, standings, plots, ablations, agreement)
    generators = {generator.__name__: generator for generator in every}
    return re.sub(
        r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)",
        lambda part: f"{part[1]}{generators[part[2]]()}\n{part[3]}",
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))
        print(f"Wrote {page}")
    PICTURES.mkdir(exist_ok=True)
    for path, picture in pictures().items():
        picture.write(path)
        print(f"Wrote {path}")
    print(f"Wrote {write_readme()}")
