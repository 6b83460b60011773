"""Variants: what a name such as `v04:pad=0` means, that each is right, and what is refused."""

import attention_cases as cases
import pytest
import torch

import flash_tutorial as ft
from flash_tutorial import build, registry
from flash_tutorial.diff import diff

OPTIONS = [(version, option) for version in ft.versions() for option in version.options]
VARIANTS = [
    f"{version.name}:{option.name}={word}"
    for version, option in OPTIONS
    for word in option.words
    if word != option.words[0]
]
CASES = [
    cases.Case((97, 130), (1, 4, 2), head_dim, causal, -0.1 if causal else None, "contiguous", "normal", "")
    for head_dim in (32, 64, 128)
    for causal in (False, True)
]


@pytest.mark.parametrize("version, option", OPTIONS, ids=lambda value: value.name)
def test_the_first_value_is_the_kernels_own(version, option):
    assert registry.resolve(f"{version.name}:{option.name}={option.words[0]}") == version


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_changes_one_line(name):
    changes = diff(name)
    assert (changes.added, changes.removed) == (1, 1)
    assert changes.new == name and changes.old == f"{name.partition(':')[0]}.cu"


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_right(name, case, device):
    version = registry.resolve(name)
    if version.tiles:  # with one tile shape it compiles in a third of the time; so small a problem takes the smallest
        name += f",tiles={version.tiles[-1]}"
    for dtype in version.dtypes:
        cases.check(name, case._replace(dtype=dtype), device)


def test_settings_go_together_and_have_one_order():
    assert registry.resolve("v4:pad=0, copies=scalar").name == "v04_vectorized:copies=scalar,pad=0"
    assert registry.resolve("vectorized:pad=0,unroll=2").name == "v04_vectorized:pad=0"


@pytest.mark.parametrize(
    "name, complaint",
    [
        ("v04:stages=2", "v04_vectorized has no option 'stages' to vary: it has copies=vector|scalar; pad=4|0"),
        ("v04:pad=3", "v04_vectorized:pad is '3': accepted are 4, 0"),
        ("v04:pad", "pad is '': accepted are 4, 0"),
        ("v04:", "no option ''"),
        ("v04:pad=0,pad=4", "sets pad twice"),
        ("v00:pad=0", "v00_naive has no option 'pad' to vary: it has none"),
        ("v99:pad=0", "unknown version 'v99'"),
        ("v04:pad=0:copies=scalar", "further settings follow a comma"),
    ],
)
def test_an_unknown_variant_is_refused_with_those_there_are(name, complaint):
    with pytest.raises(ValueError) as caught:
        registry.resolve(name)
    assert complaint in str(caught.value)


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_TUTORIAL_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "my_v04.cu"
    path.write_text(ft.version("v04").source.read_text())
    return path


def test_a_readers_own_kernel_has_variants_too(own):
    version = registry.resolve(f"{own}:pad=0")
    assert version.label == "my_v04:pad=0" and "constexpr int PAD = 0;" in version.source.read_text()
    own.write_text(own.read_text().replace("constexpr int PAD = 4;", "constexpr int PAD = 8;"))
    assert registry.resolve(f"{own}:pad=4").label == "my_v04:pad=4"


def test_a_path_may_have_a_colon(own):
    path = own.rename(own.with_name("a:my_v04.cu"))
    assert registry.resolve(path).source == path
    assert registry.resolve(f"{path}:pad=0").label == "a:my_v04:pad=0"
    with pytest.raises(ValueError, match="there is no kernel file 'b:my_v04.cu'"):
        registry.resolve("b:my_v04.cu")


def test_where_a_variant_cannot_be_kept_another_place_is_named(own, tmp_path):
    (tmp_path / "cache").write_text("a file where the cache should be")
    with pytest.raises(OSError, match="v04_vectorized__pad_0.cu cannot be kept .*FLASH_TUTORIAL_CACHE"):
        registry.resolve("v04:pad=0")


def test_a_constant_that_is_gone_is_named(own):
    own.write_text(own.read_text().replace("PAD", "PADDING"))
    with pytest.raises(ValueError, match="my_v04.cu defines the constant PAD 0 times"):
        registry.resolve(f"{own}:pad=0")


def test_a_variant_follows_its_kernel(own):
    """It is written anew when the kernel has changed, and only then."""
    name = f"{own}:pad=0"
    before = registry.resolve(name)
    written = before.source.stat().st_mtime_ns
    assert registry.resolve(name).source.stat().st_mtime_ns == written
    old_hash = build.source_hash(before)
    own.write_text(own.read_text() + "// more\n")
    assert build.source_hash(registry.resolve(name)) != old_hash


def test_a_variant_costs_what_it_should():
    """K rows without padding start in the same bank: that is what the padding is for."""
    q, k, v = torch.randn(3, 1, 1, 64, 64)
    conflicts = []
    for name in ("v04", "v04:pad=0"):
        with ft.emulator.instrument() as report:
            ft.attention(q, k, v, version=name)
        conflicts.append(report.totals.shared_load_conflicts)
    assert conflicts[0] == 0 < conflicts[1]
