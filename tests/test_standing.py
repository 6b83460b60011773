"""How near versions come to FlashAttention-2: which stored rows are held against each other, and the table."""

import itertools
import re
import shlex
from dataclasses import asdict

import command
import pytest

import flash_tutorial as ft
from flash_tutorial import results, standing
from flash_tutorial.suites import SUITES
from flash_tutorial.versions import accepting

GPU = "NVIDIA Test 1"
SHAPES = {shape.seq: shape for shape in SUITES["blog"].shapes()}
PAPER = {(shape.brief, shape.seq): shape for shape in SUITES["paper"].shapes()}
FAMILIES = ("D=64 full", "D=64 causal", "D=128 full", "D=128 causal")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where results are kept: nothing is, so far."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    return tmp_path


def keep(gpu=GPU, **run):
    """Adds a run of `measured` rows."""
    results.append("times", measured(**run), where={"name": gpu})


def measured(lengths=SHAPES, stale=(), families=("D=128 full",), **microseconds):
    """Rows of contenders: by name their times, one for all problems or one for each length."""
    rows = []
    for name, times in microseconds.items():
        version = {} if name.startswith("sdpa") else {"kernel_hash": "old" if name in stale else hash_of(name)}
        name = name if name.startswith("sdpa") else ft.version(name).name
        for family, (place, seq) in itertools.product(families, enumerate(lengths)):
            time = times if isinstance(times, float) else times[place]
            figures = {"microseconds": dict.fromkeys(("median", "p20", "p80"), time)} if time else {"wrong": "out[0]"}
            rows.append({"version": name, **asdict(PAPER[family, seq]), **version, **figures})
    return rows


def hash_of(name):
    return results.kernel_hash(ft.version(name).name)


def cells():
    """By version, what the table has for it."""
    text, _, _ = standing.markdown().partition("<details>")
    return rows_of(text)


def family_cells():
    """By contender, what the table of families has for it."""
    _, _, text = standing.markdown().partition("</details>")
    return rows_of(text)


def rows_of(text):
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| (v\d|sdpa)", line)]
    return {row[0]: row[1:] for row in rows}


# ---------------------------------------------------------------------------------------------- elsewhere


@pytest.mark.parametrize(
    ("version", "kernel"), [("v04", None), *zip(("v05", "v06", "v07", "v08", "v09"), (1, 2, 5, 6, 7), strict=True)]
)
def test_a_version_stands_beside_the_last_kernel_that_has_nothing_of_a_later_one(version, kernel):
    assert standing.nearest(ft.version(version)) == kernel


def test_what_takes_up_the_rest_stands_beside_the_last_one():
    made = ft.version("v09")
    versions = {number: type(made)(**{**vars(made), "number": number}) for number in (10, 11)}
    assert standing.nearest(versions[10]) == len(standing.KERNELS)
    assert standing.nearest(versions[11]) is None, "it has nothing of the series"


def test_a_change_is_from_the_kernel_before_to_its_own():
    step = "swizzle: no bank conflicts"
    assert standing.change(2) == [(step, "A100", 15.8, 72.6), (step, "RTX 3090", 49.5, 98.3)]


def test_the_table_has_the_figures_of_that_kernel_and_the_series_is_below():
    assert [row[-5:] for name, row in cells().items() if name.startswith(("v05", "v07"))] == [
        ["1", "15.8", "16.6", "49.5", "49.8"],
        ["5", "76.8", "79.1", "99.7", "100.3"],
    ]
    series = re.findall(r"^\| (\d+) \|.*\| v(\d\d) \|(.*)$", standing.markdown(), re.MULTILINE)
    assert [int(number) for number, *_ in series] == list(range(1, 17))
    assert {int(version) for _, version, _ in series} == set(range(5, 11))
    assert series[9][2] == " 93.9 | 95.0 | 102.9 | 102.3 |"


# ---------------------------------------------------------------------------------------------- here


def test_shares_are_those_of_one_run_whatever_the_next_says_of_the_reference():
    keep(v05=400.0, sdpa_flash=100.0)
    keep(v06=100.0, sdpa_flash=80.0)
    assert [cells()[ft.version(name).name][:2] for name in ("v05", "v06")] == [["25.0", "25.0"], ["80.0", "80.0"]]


def test_the_mean_is_that_of_the_speeds_as_bench_has_it():
    times = [100.0, 100.0, 200.0, 200.0, 400.0, 100.0]
    keep(v05=times, sdpa_flash=100.0)
    slowness = [time / SHAPES[seq].flops for seq, time in zip(SHAPES, times)]
    mean = sum(100.0 / SHAPES[seq].flops for seq in SHAPES) / sum(slowness)
    assert cells()["v05_tensor_core"][:2] == ["50.0", f"{100 * mean:.1f}"]
    shown = command.call("bench", "v05", "--suite", "blog", "--baseline", "sdpa_flash", "--stored", "--only").stdout
    row = re.findall(r"^v05_tensor_core +(.*)$", shown[shown.index("Speed in %") :], re.MULTILINE)[0].split()
    assert (row[3], row[-1]) == ("50.0", f"{100 * mean:.1f}")


def test_the_newest_run_counts():
    keep(v05=400.0, sdpa_flash=100.0)
    keep(v05=200.0, sdpa_flash=100.0)
    assert cells()["v05_tensor_core"][:2] == ["50.0", "50.0"]


def test_a_newer_run_of_fewer_lengths_is_not_taken_for_a_whole_one():
    keep(v05=400.0, sdpa_flash=100.0)
    keep(lengths=[1024, 4096], v05=200.0, sdpa_flash=100.0)
    assert cells()["v05_tensor_core"][:2] == ["25.0", "25.0"]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({"lengths": [1024, 4096], "v05": 200.0, "sdpa_flash": 100.0}, ["50.0", "–"]),
        ({"lengths": [512], "v05": 200.0, "sdpa_flash": 100.0}, ["–", "–"]),
        ({"v05": [200.0] * 5 + [None], "sdpa_flash": 100.0}, ["50.0", "–"]),  # wrong at 16,384
        ({"v05": [200.0] * 3 + [None] + [200.0] * 2, "sdpa_flash": 100.0}, ["–", "–"]),  # at 4,096
        ({"v05": 200.0, "sdpa_flash": [100.0] * 5 + [None]}, ["50.0", "–"]),
        ({"v06": 200.0, "sdpa_flash": 100.0}, ["–", "–"]),
    ],
)
def test_what_has_no_time_is_a_dash(run, expected):
    keep(**run)
    assert cells()["v05_tensor_core"][:2] == expected


def test_times_without_flash_attention_beside_them_are_none():
    keep(v05=200.0)
    keep(sdpa_flash=100.0)
    assert standing.stored() == {}
    assert standing.markdown().count("No times are stored yet.") == 2
    assert family_cells() == {}
    assert list(cells()) == [version.name for version in accepting("bfloat16")]


def test_other_problems_and_variants_are_left_out():
    rows = [
        {"version": name, **asdict(shape), "microseconds": dict.fromkeys(("median", "p20", "p80"), 100.0)}
        for name in ("v05_tensor_core:copies=sync", "v05_tensor_core", "sdpa_flash")
        for shape in (SHAPES[4096], *SUITES["article"].shapes())
        if name != "v05_tensor_core" or shape not in SHAPES.values()
    ]
    results.append("times", rows, where={"name": GPU})
    assert standing.stored() == {}


def test_every_gpu_has_columns():
    keep(v05=200.0, sdpa_flash=100.0)
    keep("NVIDIA Other", v05=400.0, v06=100.0, sdpa_flash=100.0)
    text = standing.markdown()
    assert "| version | Other, N=4096 | mean | Test 1, N=4096 | mean | nearest kernel | A100, N=4096 |" in text
    assert cells()["v05_tensor_core"][:4] == ["25.0", "25.0", "50.0", "50.0"]
    assert cells()["v06_swizzled"][:4] == ["100.0", "100.0", "–", "–"]
    assert re.search(r"Measured here: NVIDIA Other, 20\d\d-\d\d-\d\d; NVIDIA Test 1, 20\d\d-\d\d-\d\d\.", text)


def test_a_kernel_that_has_changed_since_is_marked():
    keep(v05=200.0, v06=100.0, sdpa_flash=100.0, stale=("v05",))
    assert cells()["v05_tensor_core"][:2] == ["50.0*", "50.0*"]
    assert cells()["v06_swizzled"][:2] == ["100.0", "100.0"]
    assert "An asterisk: measured before the kernel's last change." in standing.markdown()


def test_its_commands_name_every_version_and_show_what_is_stored():
    keep(v05=200.0, sdpa_flash=100.0)
    commands = re.findall(r"^\.venv/bin/flash-tutorial (.*)$", standing.markdown(), re.MULTILINE)
    assert [re.search(r"--suite (\w+)", words)[1] for words in commands] == ["blog", "paper"]
    assert "sdpa_flash sdpa_cudnn --only" in commands[1]
    for words in commands:
        assert [f"v{version.number:02}" for version in accepting("bfloat16")] == re.findall(r"\bv\d\d\b", words)
        result = command.call(*shlex.split(words))
        assert result.exit_code == 0 and "Speed in % of sdpa_flash" in result.stdout


# ---------------------------------------------------------------------------------------------- every family


def test_every_family_has_a_column_and_cudnn_a_row_if_it_was_there():
    keep(families=FAMILIES[:2], v05=200.0, sdpa_flash=100.0)
    assert " | ".join(f"Test 1, {family}" for family in FAMILIES) in standing.markdown()
    assert list(family_cells()) == [version.name for version in accepting("bfloat16")]
    assert family_cells()["v05_tensor_core"] == ["50.0", "50.0", "–", "–"]
    assert family_cells()["v06_swizzled"] == ["–"] * 4
    keep(families=FAMILIES[2:], sdpa_flash=100.0, sdpa_cudnn=80.0)
    assert family_cells()["sdpa_cudnn"] == ["–", "–", "125.0", "125.0"]
    assert "sdpa_cudnn" not in cells()


def test_the_figure_of_a_family_is_the_ratio_of_the_harmonic_means():
    times = [100.0, 100.0, 200.0, 200.0, 400.0, 100.0]
    keep(families=FAMILIES, v05=times, sdpa_flash=100.0)
    slowness = sum(time / SHAPES[seq].flops for seq, time in zip(SHAPES, times, strict=True))
    mean = sum(100.0 / SHAPES[seq].flops for seq in SHAPES) / slowness
    assert family_cells()["v05_tensor_core"] == [f"{100 * mean:.1f}"] * 4


def test_families_of_a_row_are_all_from_the_newest_run_of_the_most_of_them():
    keep(families=FAMILIES, v05=400.0, v06=400.0, sdpa_flash=100.0)
    keep(families=FAMILIES, v05=200.0, sdpa_flash=100.0)
    keep(v05=100.0, v06=100.0, sdpa_flash=100.0)  # of one family
    keep(families=FAMILIES, v05=100.0)  # without FlashAttention-2
    keep(families=FAMILIES, lengths=[512, 4096], v05=100.0, sdpa_flash=100.0)
    assert family_cells()["v05_tensor_core"] == ["50.0"] * 4
    assert family_cells()["v06_swizzled"] == ["25.0"] * 4
    assert cells()["v05_tensor_core"][:2] == ["100.0", "100.0"]  # which is of one family


def test_of_runs_of_one_whole_family_the_newest_counts_whatever_parts_the_others_have():
    whole = measured(families=FAMILIES[:1], v05=400.0, sdpa_flash=100.0)
    part = measured(families=FAMILIES[1:], lengths=[512], v05=400.0, sdpa_flash=100.0)
    results.append("times", whole + part, where={"name": GPU})
    keep(families=FAMILIES[1:2], v05=200.0, sdpa_flash=100.0)
    assert family_cells()["v05_tensor_core"] == ["–", "50.0", "–", "–"]


@pytest.mark.parametrize("wrong", ["v05", "sdpa_flash"])
def test_a_family_without_all_lengths_is_a_dash(wrong):
    times = {"v05": 200.0, "sdpa_flash": 100.0, wrong: [100.0] * 5 + [None]}
    keep(families=FAMILIES, **times)
    assert family_cells()["v05_tensor_core"] == ["–"] * 4


def test_families_have_columns_for_every_gpu_and_say_what_is_stale():
    keep(families=FAMILIES, v05=200.0, v06=100.0, sdpa_flash=100.0, stale=("v05",))
    keep("NVIDIA Other", families=FAMILIES, v05=400.0, sdpa_flash=100.0)
    assert family_cells()["v05_tensor_core"] == ["25.0"] * 4 + ["50.0*"] * 4
    assert family_cells()["v06_swizzled"] == ["–"] * 4 + ["100.0"] * 4
    assert standing.markdown().count("An asterisk: measured before the kernel's last change.") == 2


def test_damaged_results_are_told(folder):
    (folder / "test_1.json").write_text("{")
    with pytest.raises(ValueError, match="test_1.json is damaged"):
        standing.markdown()
