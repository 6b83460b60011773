"""Pictures and tables of stored figures: what they show, that nothing is covered, and what they say for want of any."""

import itertools
import json

import numpy as np
import pytest
from command import call, refused

from flash_tutorial import ablation, charts, registry, results
from flash_tutorial.suites import SUITES, Shape
from flash_tutorial.versions import VERSIONS

pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib: pip install matplotlib")
from matplotlib.text import Text

from flash_tutorial import plots

H200 = {"name": "NVIDIA H200"}
LARGE = Shape(4, 12, 2048, 64)  # the pedagogical suite's largest
MEASURED = {"tflops": {"float32": 50.0, "bfloat16": 700.0}, "copy_tb_s": 4.0}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """An empty results folder."""
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def problem(shape: Shape) -> dict:
    names = ("batch", "heads", "kv_heads", "head_dim", "dtype", "causal")
    return {name: getattr(shape, name) for name in names}


def timed(name: str, median: float, shape: Shape = LARGE, spread: float = 0.01, stale: bool = False) -> dict:
    """A row of times, as `flash-tutorial bench` stores it; a reference's name is no version's."""
    full = name if name.startswith("sdpa") else registry.resolve(name).name
    kernel = {} if full == name else {"kernel_hash": "changed" if stale else results.kernel_hash(full)}
    times = {"median": median, "p20": median * (1 - spread), "p80": median * (1 + spread)}
    return {"version": full, **problem(shape), "seq": shape.seq, **kernel, "microseconds": times, "tflops": 0.0}


def profiled(name: str, read: int, written: int = 0, shape: Shape = LARGE, duration: float = 1000.0) -> dict:
    """A row of a profile, as `flash-tutorial profile` stores it."""
    full = registry.resolve(name).name
    moved = {"dram_read_bytes": read, "dram_write_bytes": written, "duration_us": duration}
    lengths = {"queries": shape.seq, "keys": shape.seq}
    return {"version": full, **problem(shape), **lengths, "kernel_hash": results.kernel_hash(full), **moved}


def store(*rows: dict, kind: str = "times", gpu: dict = H200, **more) -> None:
    results.append(kind, list(rows), where=gpu, **more)


# ---------------------------------------------------------------------------------------------- labels


def covering(axes) -> list[tuple[str, str]]:
    """Pairs of texts in the axes that cover one another."""
    axes.get_figure().draw_without_rendering()
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in axes.texts if text.get_text()]  # not its arrow
    return [(a, b) for (a, first), (b, second) in itertools.combinations(boxes, 2) if first.overlaps(second)]


def point(intensity, achieved, ceiling="FP32"):
    return {"intensity": intensity, "achieved": achieved, "ceiling": ceiling}


CROWDS = {
    "one above the other": {f"v{i:02}": point(500, 4e12 * 1.02**i) for i in range(6)},
    "close together": {f"v{i:02}": point(300 + i % 4, 3e13 + 1e11 * i) for i in range(15)},
    "under the ridge": {f"v{i:02}": point(11.5 + i / 50, 4.9e13) for i in range(5)},
    "far apart": {f"v{i:02}": point(10.0**i, 10.0 ** (10 + i)) for i in range(4)},
}


@pytest.mark.parametrize("points", CROWDS.values(), ids=CROWDS)
@pytest.mark.parametrize("panels", [1, 2])
def test_roofline_labels_cover_nothing_and_stay_inside(points, panels):
    memories = dict.fromkeys(("DRAM", "shared memory")[:panels], (4000000000000.0, points))
    ceilings = {"FP32": 5e13, "BF16 tensor cores": 7e14}
    figure = plots.roofline(memories, ceilings=ceilings, roof="GPU", notes=["Below."])
    for axes in figure.axes:
        assert covering(axes) == []
        frame = axes.get_window_extent()
        for text in axes.texts:
            if text.get_text() in points:
                box = text.get_window_extent()
                assert frame.contains(*box.min) and frame.contains(*box.max), text.get_text()
        assert {text.get_text() for text in axes.texts} >= set(points)


def test_points_at_one_place_share_a_label():
    figure = plots.roofline({"DRAM": (4e12, {n: point(9, 1e12) for n in "ab"})}, ceilings={"FP32": 5e13}, roof="GPU")
    assert "a, b" in [text.get_text() for text in figure.axes[0].texts]


def line(*speeds, reference=False, stale=False):
    lengths = [512 * 2**i for i in range(len(speeds))]
    return {
        "lengths": lengths,
        "median": list(speeds),
        "low": [0.95 * speed for speed in speeds],
        "high": [1.1 * speed for speed in speeds],
        "stale": [stale] * len(speeds),
        "reference": reference,
    }


@pytest.mark.parametrize("count", [1, 5, 20])
@pytest.mark.parametrize("families", [1, 4])
def test_names_at_the_ends_of_lines_cover_nothing(count, families):
    lines = {f"v{i:02}:layout=padded": line(300, 310 + i) for i in range(count)}
    figure = plots.speeds({f"family {i}": lines for i in range(families)}, notes=["Below."])
    for axes in figure.axes:
        assert covering(axes) == []
        assert len(axes.texts) == count


def span(row, start, end, kind="product", text=""):
    return {"row": row, "start": start, "end": end, "kind": kind, "text": text}


def test_timeline_draws_each_schedule_to_one_scale():
    early = [span("K", 0, 5, "copy", "K0"), span("warps", 0, 5, "wait"), span("warps", 5, 7, text="S0")]
    figure = plots.timeline({"early": early, "late": [span("warps", 1, 9)]}, unit="units of time")
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim() == (0, 9)
    assert [label.get_text() for label in first.get_yticklabels()] == ["K", "warps"]
    assert [(bar.get_x(), bar.get_width()) for bar in first.patches] == [(0, 5), (0, 5), (5, 2)]
    assert [text.get_text() for text in first.texts] == ["K0", "S0"] and covering(first) == []
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["a copy is under way", "product", "waits for a copy"]  # what is there, and nothing else


def test_timeline_refuses_a_row_that_does_two_things_at_once():
    with pytest.raises(ValueError, match="late: two bars of the row K overlap"):
        plots.timeline({"late": [span("K", 4, 9, "copy"), span("K", 0, 5, "copy"), span("V", 0, 9)]}, unit="")


@pytest.mark.parametrize("wanted", [[0.1, 0.5, 0.9], [0.5] * 4, [0.0, 0.0, 1.0, 1.0], [0.98, 0.99, 1.0], []])
def test_heights_move_no_further_than_they_have_to(wanted):
    found = np.array(plots._apart(wanted, 0.1))
    assert np.all(np.diff(found) >= 0.1 - 1e-9)
    assert np.all((found > -1e-9) & (found < 1 + 1e-9))
    if len(wanted) > 1 and np.diff(wanted).min() >= 0.1:
        assert found == pytest.approx(wanted)
    if wanted == [0.5] * 4:
        assert found == pytest.approx([0.35, 0.45, 0.55, 0.65])


def test_stale_points_are_hollow_and_references_dashed():
    lines = {"v04": line(30, 31, stale=True), "v03": line(7, 8), "sdpa_flash": line(40, 41, reference=True)}
    drawn = plots.speeds({"family": lines}).axes[0].get_lines()
    by_speed = {tuple(each.get_ydata()): each for each in drawn if each.get_linestyle() != "None"}
    assert by_speed[40, 41].get_linestyle() == "--"
    assert by_speed[30, 31].get_linestyle() == by_speed[7, 8].get_linestyle() == "-"
    dots = {tuple(each.get_ydata()): each.get_markerfacecolor() for each in drawn if each.get_linestyle() == "None"}
    assert dots[30, 31] == "white" != dots[7, 8]


@pytest.mark.parametrize(("slow", "scale"), [(0.2, "log"), (20, "linear")])
def test_the_scale_follows_what_is_compared(slow, scale):
    axes = plots.speeds({"family": {"v01": line(slow, slow), "v04": line(37, 38)}}).axes[0]
    assert axes.get_yscale() == scale


# ---------------------------------------------------------------------------------------------- files


@pytest.fixture
def picture():
    store(timed("v03", 6657), timed("v04", 1383), ceilings=MEASURED)
    store(profiled("v03", 10**8), profiled("v04", 10**8), kind="profiles")
    return charts.roofline()


@pytest.mark.parametrize("suffix", charts.SUFFIXES)
def test_the_same_figures_give_the_same_file(picture, tmp_path, suffix):
    for name in ("one", "two"):
        picture.write(tmp_path / f"{name}{suffix}")
    assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"one{suffix}", "results", f"two{suffix}"]


@pytest.mark.parametrize("suffix", charts.SUFFIXES)
def test_a_file_says_which_figures_it_shows(picture, tmp_path, suffix):
    path = tmp_path / f"picture{suffix}"
    assert charts.digest_of(path) is None
    picture.write(path)
    assert charts.digest_of(path) == picture.digest == charts.roofline().digest
    store(timed("v04", 1382), ceilings=MEASURED)
    assert charts.roofline().digest != charts.digest_of(path)


def test_a_file_of_something_else_has_no_digest(tmp_path):
    (tmp_path / "other.svg").write_text("<svg/>")
    assert charts.digest_of(tmp_path / "other.svg") is None


def test_a_failed_drawing_leaves_the_old_file(picture, tmp_path, monkeypatch):
    path = tmp_path / "picture.svg"
    path.write_text("old")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        picture.write(path)
    assert path.read_text() == "old"
    assert not list(tmp_path.glob(".*"))


# ---------------------------------------------------------------------------------------------- roofline


def points(picture) -> dict:
    return picture.data["panels"]["DRAM"][1]


def test_bytes_are_nsights_where_a_profile_is_stored():
    store(timed("v03", 6000), timed("v04", 1500), ceilings=MEASURED)
    store(profiled("v04", 150_000_000, 25_000_000), kind="profiles")
    picture = charts.roofline()
    v03, v04 = points(picture)["v03"], points(picture)["v04"]
    assert v04["achieved"] == pytest.approx(LARGE.flops / 1500e-6)  # the time is the benchmark's, not the profile's
    assert v04["intensity"] == pytest.approx(LARGE.flops / 175e6)
    assert not v04["counted"] and v03["counted"]
    assert picture.data["notes"][-2:] == [
        "Dots: bytes measured by Nsight Compute",
        "Rings: bytes counted, inputs and outputs once, whatever else is written out and back",
    ]


def test_a_profile_alone_gives_a_point_and_says_so():
    store(timed("v03", 6000), ceilings=MEASURED)
    store(profiled("v04", 10**8, duration=2000), kind="profiles")
    picture = charts.roofline()
    assert points(picture)["v04"]["achieved"] == pytest.approx(LARGE.flops / 2000e-6)
    assert picture.data["notes"][-1] == "Timed under Nsight Compute only: v04"


def test_a_profile_without_bytes_is_no_profile():
    store(timed("v04", 1500), ceilings=MEASURED)
    store(profiled("v04", None), kind="profiles")
    assert points(charts.roofline())["v04"]["counted"]


def test_counted_bytes_are_what_has_to_be_moved():
    inputs_and_outputs = 4 * 12 * 2048 * (4 * 64 * 4 + 4)
    assert charts.counted_bytes("v04", LARGE) == inputs_and_outputs
    assert (
        charts.counted_bytes("v04", Shape(4, 12, 2048, 64, kv_heads=6)) == inputs_and_outputs - 4 * 12 * 2048 * 64 * 4
    )
    # v00 writes S once and P twice.
    assert charts.counted_bytes("v00", LARGE) == inputs_and_outputs + 6 * 4 * 12 * 2048 * 2048 * 4


def test_counted_bytes_of_half_precision():
    bytes_ = charts.counted_bytes("v05", Shape(1, 16, 4096, 128, "bfloat16"))
    assert bytes_ == 16 * 4096 * (4 * 128 * 2 + 4)


def test_ceilings_are_those_measured_last():
    half = Shape(4, 16, 4096, 128, "bfloat16")
    store(timed("v05", 1500, half), timed("v04", 1500), ceilings=MEASURED)
    store(timed("v04", 1400), ceilings={"tflops": {"float32": 51.0}, "copy_tb_s": 4.1})
    store(timed("v04", 1300))
    data = charts.roofline().data
    assert data["panels"]["DRAM"][0] == pytest.approx(4.1e12)
    assert data["ceilings"] == {"BF16 tensor cores": 700e12, "FP32": 51e12}
    assert data["notes"][0].startswith("Ceilings: measured 20")
    assert charts.roofline(["v04"]).data["ceilings"] == {"FP32": 51e12}


def test_ceilings_of_which_one_is_not_measured_are_the_published_ones():
    store(timed("v04", 1400), ceilings={"tflops": {"float32": 51.0}, "copy_tb_s": 4.1})
    store(timed("v05", 1500, Shape(4, 16, 4096, 128, "bfloat16")))
    data = charts.roofline().data
    assert data["notes"][0] == "Ceilings: as published"
    assert data["ceilings"]["BF16 tensor cores"] == 989.5e12


def test_without_measured_ceilings_the_published_ones_are_shown():
    store(timed("v04", 1500))
    data = charts.roofline().data
    assert data["panels"]["DRAM"][0] == 4.8e12
    assert data["notes"][0] == "Ceilings: as published"


def test_a_gpu_whose_ceilings_nobody_knows_is_refused():
    store(timed("v04", 1500), gpu={"name": "NVIDIA GeForce RTX 9999"})
    with pytest.raises(ValueError, match="ceilings of NVIDIA GeForce RTX 9999 are not known: `flash-tutorial bench`"):
        charts.roofline()


def test_as_many_versions_as_possible_stand_at_one_problem():
    small, causal = Shape(4, 12, 512, 64), Shape(4, 12, 4096, 64, causal=True)
    half = Shape(4, 16, 4096, 128, "bfloat16")
    store(*(timed(name, 1e3, shape) for name in ("v02", "v03", "v04") for shape in (small, LARGE)), ceilings=MEASURED)
    store(timed("v04", 9e3, Shape(4, 12, 8192, 64)), timed("v03", 1, causal), timed("v04", 1, causal))
    store(timed("v05", 500, half), timed("v05", 20, Shape(4, 16, 512, 128, "bfloat16")))
    notes = charts.roofline().data["notes"]
    assert notes[1:3] == ["v02–v04: float32, B=4, H=12, M=N=2048, D=64", "v05: bfloat16, B=4, H=16, M=N=4096, D=128"]
    # A profile counts where there is a time, too.
    store(*(profiled(name, 10**8, shape=small) for name in ("v02", "v03", "v04")), kind="profiles")
    store(profiled("v05", 10**8, shape=Shape(4, 12, 2048, 64, "float16")), kind="profiles")
    notes = charts.roofline().data["notes"]
    assert notes[1:3] == ["v02–v04: float32, B=4, H=12, M=N=512, D=64", "v05: bfloat16, B=4, H=16, M=N=4096, D=128"]


def test_figures_of_a_changed_kernel_are_named():
    store(timed("v03", 6000), timed("v04", 1500, stale=True), ceilings=MEASURED)
    assert charts.roofline().data["notes"][-1] == "Measured before the kernel's last change: v04"


def test_what_nothing_is_stored_of_is_left_out_and_told():
    store(timed("v03", 6000), timed("v04", 1500), timed("v04:pad=0", 2000), timed("sdpa_math", 900), ceilings=MEASURED)
    picture = charts.roofline()
    assert list(points(picture)) == ["v03", "v04"]
    assert set(picture.missing) == {registry.short(v.name) for v in VERSIONS} - {"v03", "v04"}
    assert list(points(charts.roofline(["v04:pad=0", "v04"]))) == ["v04:pad=0", "v04"]
    assert "v04 at 34.4 TFLOP/s" in picture.alt


def test_a_wrong_result_has_no_point():
    row = timed("v04", 1500)
    del row["microseconds"]
    store(timed("v03", 6000), {**row, "wrong": "error 1 exceeds 0.1"}, ceilings=MEASURED)
    assert list(points(charts.roofline())) == ["v03"]


# ---------------------------------------------------------------------------------------------- speed over the length


def test_speeds_are_medians_with_their_spread():
    shapes = SUITES["pedagogical"].shapes()
    store(*(timed("v04", 100.0 * shape.seq, shape, spread=0.1) for shape in reversed(shapes)))
    store(timed("sdpa_math", 1000, LARGE), timed("v04", 1, Shape(1, 1, 64, 64)))
    picture = charts.speeds()
    ((title, lines),) = picture.data["panels"].items()
    assert title == "float32, B=4, H=12, D=64, full"
    tflops = [shape.flops / (100 * shape.seq) / 1e6 for shape in shapes]
    assert lines["v04"]["lengths"] == [shape.seq for shape in shapes]
    assert lines["v04"]["median"] == pytest.approx(tflops, rel=1e-3)
    assert lines["v04"]["low"] == pytest.approx([speed / 1.1 for speed in tflops], rel=1e-3)
    assert lines["v04"]["high"] == pytest.approx([speed / 0.9 for speed in tflops], rel=1e-3)
    assert not lines["v04"]["reference"] and lines["sdpa_math"]["reference"]
    assert "v05" not in picture.missing and "v03" in picture.missing  # v05 takes no float32
    assert "at the right end of each line" in picture.alt and "sdpa_math 51.5 (N=2,048)" in picture.alt


def test_each_family_has_a_panel():
    store(*(timed("v05", 100, shape) for shape in SUITES["paper"].shapes()))
    panels = charts.speeds(suite="paper").data["panels"]
    assert list(panels) == [
        "bfloat16, B·N=16,384, H=32, D=64, full",
        "bfloat16, B·N=16,384, H=32, D=64, causal",
        "bfloat16, B·N=16,384, H=16, D=128, full",
        "bfloat16, B·N=16,384, H=16, D=128, causal",
    ]
    assert all(lines["v05"]["lengths"] == [512, 1024, 2048, 4096, 8192, 16384] for lines in panels.values())


def test_stale_speeds_are_told():
    store(timed("v03", 6000), timed("v04", 1500, stale=True))
    picture = charts.speeds()
    (lines,) = picture.data["panels"].values()
    assert lines["v04"]["stale"] == [True] and lines["v03"]["stale"] == [False]
    assert picture.data["notes"][-1] == "Hollow, measured before the kernel's last change: v04"


def test_a_gpu_is_the_one_asked_for_or_the_one_measured_last():
    store(timed("v04", 1500), gpu={"name": "NVIDIA GeForce RTX 4090"})
    store(timed("v04", 1400))
    assert "NVIDIA GeForce RTX 4090, suite" in charts.speeds(gpu="rtx_4090").data["notes"][0]
    assert results.find_gpu("times", "NVIDIA H200") == results.find_gpu("times", "h200") == "NVIDIA H200"
    with pytest.raises(ValueError, match="no times of a GPU 'a100' in results: those with times are h200, rtx_4090"):
        charts.speeds(gpu="a100")


# ---------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("command", ["roofline", "plot"])
@pytest.mark.parametrize("suffix", charts.SUFFIXES)
def test_a_command_writes_the_picture_and_says_what_it_shows(command, suffix, tmp_path):
    store(timed("v03", 6000), timed("v04", 1500), ceilings=MEASURED)
    out = tmp_path / f"picture{suffix}"
    done = call(command, "v03", "v04", "--out", out)
    assert done.exit_code == 0
    assert done.stdout.startswith(f"{out}: ") and "v04" in done.stdout
    assert charts.digest_of(out) in (charts.roofline(["v03", "v04"]).digest, charts.speeds(["v03", "v04"]).digest)
    assert done.stderr == ""
    assert "left out, as nothing is stored of them: v00" in call(command, "--out", out).stderr


@pytest.mark.parametrize("command", ["roofline", "plot"])
def test_a_command_refuses_what_it_cannot_show(command, tmp_path):
    out = tmp_path / "picture.svg"
    assert "no figures are stored of v00, v01" in refused(command, "--out", out)
    store(timed("v04", 1500), ceilings=MEASURED)
    assert "unknown version 'v99'" in refused(command, "v99", "--out", out)
    assert "v04_vectorized has no option 'padding'" in refused(command, "v04:padding=1", "--out", out)
    message = refused(command, "v04", "v03", "v04:pad=0", "--out", out)
    assert "of NVIDIA H200 are stored of v03, v04:pad=0: on a GPU `flash-tutorial bench v03 v04:pad=0" in message
    assert "no times of a GPU 'a100'" in refused(command, "--gpu", "a100", "--out", out)
    assert "ends in '.pdf': accepted are .svg, .png" in refused(command, "--out", tmp_path / "picture.pdf")
    assert "is a directory" in refused(command, "--out", tmp_path)
    assert "there is no directory" in refused(command, "--out", tmp_path / "nowhere" / "picture.svg")
    assert not out.exists()


def test_a_suite_without_times_is_refused(tmp_path):
    store(timed("v04", 1500), timed("sdpa_math", 900))
    later = ", ".join(registry.short(version.name) for version in VERSIONS if "bfloat16" in version.dtypes)
    message = refused("plot", "--suite", "paper", "--out", tmp_path / "picture.svg")
    assert f"are stored of {later}: on a GPU `flash-tutorial bench all --suite paper`" in message


def test_plot_refuses_an_unknown_suite_and_a_reference_without_times(tmp_path):
    store(timed("v04", 1500))
    out = tmp_path / "picture.svg"
    assert "unknown suite 'big': There are small, pedagogical" in refused("plot", "--suite", "big", "--out", out)
    message = refused("plot", "v04", "sdpa_flash", "--out", out)
    assert "`flash-tutorial bench sdpa_flash --suite pedagogical`" in message


NO_PROBLEM = {"version": "v04_vectorized", "microseconds": {"median": 1, "p20": 1, "p80": 1}}
DAMAGED = {
    "no JSON": "{",
    "another format": json.dumps({"format": 99, "gpu": "NVIDIA H200", "runs": []}),
    "no problem": json.dumps(
        {"format": 1, "gpu": "NVIDIA H200", "runs": [{"date": "2026-01-01", "rows": [NO_PROBLEM]}]}
    ),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("command", ["roofline", "plot"])
def test_damaged_results_are_refused(command, text, folder, tmp_path):
    (folder / "h200.json").write_text(text)
    message = refused(command, "--out", tmp_path / "picture.svg")
    assert "damaged" in message or "results format 99" in message
    with pytest.raises(ValueError):
        ablation.of("v04")


def test_without_matplotlib_it_is_told_what_to_install(monkeypatch, tmp_path):
    store(timed("v04", 1500), ceilings=MEASURED)
    monkeypatch.setitem(__import__("sys").modules, "flash_tutorial.plots", None)
    monkeypatch.delattr("flash_tutorial.plots")
    assert "pip install matplotlib" in refused("plot", "--out", tmp_path / "picture.svg")


# ---------------------------------------------------------------------------------------------- ablation


def cells(text: str) -> dict[str, list[str]]:
    """The rows of a Markdown table by their first cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


def test_a_variant_is_compared_with_its_version_in_the_same_run():
    store(timed("v04", 1000), timed("v04:pad=0", 1250), timed("v04:copies=scalar", 1070))
    store(timed("v04", 2000), timed("v04:copies=scalar", 2142))  # a slower day: the ratio is what counts
    table = cells(ablation.of("v04").markdown())
    assert table["variant"] == ["what it decides", "µs", "Δ against v04", "what v04 saves", "elsewhere"]
    assert table["`v04:pad=0`"][1:] == ["1,250", "+25.0 %", "−20.0 %", "−25.5 %"]
    assert table["`v04:copies=scalar`"][1:] == ["2,142", "+7.1 %", "−6.6 %", "−6.9 %"]
    assert table["`v04:index=64bit`"][1:] == ["–", "–", "–", "−29.1 %"]
    assert table["`v04:unroll=all`"][-1] == "slower"
    assert "0 instead of 4" in table["`v04:pad=0`"][0]


def test_a_run_without_the_version_itself_says_nothing():
    store(timed("v04:pad=0", 1250))
    store(timed("v04", 1000))
    assert ablation.of("v04").gpu is None


def test_differences_within_the_spread_are_noise():
    store(timed("v04", 1000, spread=0.01), timed("v04:inline=0", 1009, spread=0.001), timed("v04:pad=0", 1011))
    rows = {row.label: row for row in ablation.of("v04").rows}
    assert rows["v04:inline=0"].noise and not rows["v04:pad=0"].noise and not rows["v04:index=64bit"].noise
    assert cells(ablation.of("v04").markdown())["`v04:inline=0`"][2] == "+0.9 % (noise)"


def test_the_problem_is_the_one_that_most_variants_have():
    small = Shape(4, 12, 512, 64)
    for shape in (small, LARGE):
        store(timed("v04", 1000, shape), timed("v04:pad=0", 1250, shape))
    assert ablation.of("v04").shape == LARGE
    store(timed("v04", 100, small), timed("v04:pad=0", 125, small), timed("v04:inline=0", 100, small))
    assert ablation.of("v04").shape == small
    assert "float32, B=4, H=12, M=N=512, D=64" in ablation.of("v04").markdown()


def test_every_variant_has_a_row_and_what_was_measured_beside_them():
    options = registry.resolve("v04").options
    names = [f"v04:{option.name}={word}" for option in options for word in option.words[1:]]
    assert [row.label for row in ablation.of("v04").rows] == names
    gone = {**timed("v04:pad=0", 1200), "version": "v04_vectorized:gone=1"}
    store(timed("v04", 1000), timed("v04:block_q=32,block_kv=32", 1400), gone)
    assert [row.label for row in ablation.of("v04").rows] == [*names, "v04:block_q=32,block_kv=32"]


def test_what_is_not_measured_says_what_measures_it():
    text = ablation.of("v04").markdown()
    assert "`flash-tutorial bench v04 v04:copies=scalar v04:pad=0 " in text and "--suite pedagogical --only`" in text
    assert "noise" not in text
    store(timed("v04", 1000), timed("v04:pad=0", 1250))
    text = ablation.of("v04").markdown()
    assert "v04:copies=scalar" in text.split("`flash-tutorial bench")[1]
    assert "v04:pad=0" not in text.split("`flash-tutorial bench")[1]
    assert "Medians on NVIDIA H200 (20" in text and "A difference is noise where" in text
    assert "--suite blog --only`" in ablation.of("v05").markdown()


def test_any_version_with_options_gets_a_table():
    half = Shape(4, 16, 4096, 128, "bfloat16")
    store(timed("v05", 500, half), timed("v05:copies=sync", 600, half))
    table = cells(ablation.of("v05").markdown())
    assert table["variant"] == ["what it decides", "µs", "Δ against v05", "what v05 saves"]  # nobody published any
    assert table["`v05:copies=sync`"][1:] == ["600", "+20.0 %", "−16.7 %"]


def test_a_changed_kernel_is_marked():
    store(timed("v04", 1000), timed("v04:pad=0", 1250, stale=True))
    text = ablation.of("v04").markdown()
    assert cells(text)["`v04:pad=0`"][1] == "1,250*"
    assert "An asterisk: measured before one of the two kernels was last changed." in text


def test_a_version_without_variants_says_so_and_a_variant_has_no_ablation():
    assert ablation.of("v03").markdown() == "v03_warp_local has no variants."
    with pytest.raises(ValueError, match="is a variant already"):
        ablation.of("v04:pad=0")


def test_the_figures_of_a_gpu_are_those_asked_for():
    store(timed("v04", 1000), timed("v04:pad=0", 1250))
    store(timed("v04", 3000), timed("v04:pad=0", 3300), gpu={"name": "NVIDIA GeForce RTX 4090"})
    assert ablation.of("v04").gpu == "NVIDIA GeForce RTX 4090"
    assert cells(ablation.of("v04", "h200").markdown())["`v04:pad=0`"][1] == "1,250"


@pytest.mark.parametrize("name", ablation.EFFECTS)
def test_published_figures_belong_to_a_variant(name):
    assert registry.resolve(name).name == name
    effect = ablation.EFFECTS[name]
    assert effect.source and (effect.note if effect.change is None else -1 < effect.change < 1)
