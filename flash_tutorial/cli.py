"""The command `flash-tutorial`: list, run, compare, bench, tune, diff, profile, inspect, hardware, pictures, doctor.

What takes long to import (torch above all) is imported by the commands that need it, so that `list`, `diff` and
`--help` answer at once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import json
import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import click
from click.core import ParameterSource
from tabulate import tabulate

from flash_tutorial import build, files
from flash_tutorial.suites import DTYPES, SUITES
from flash_tutorial.versions import VERSIONS

RIGHT, WRONG = 0, 1  # exit statuses; click's usage errors exit with 2
INTERRUPTED = 130  # as a shell has it for Ctrl-C

STATUSES = """
\b
Exit status:
  0  {right}
  1  {wrong}
  2  asked wrongly: the message says what came and what is accepted
"""


def _teach(text: str, right: str, wrong: str) -> str:
    """A command's help: its text, then what exit statuses 0 and 1 mean."""
    return inspect.cleandoc(text) + "\n" + STATUSES.format(right=right, wrong=wrong)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="""FlashAttention, one step at a time. Every version of the ladder is a CUDA kernel that runs on a GPU or, the
    same source, on an emulated one on this CPU, which counts what the kernel does to memory and sees its races.

    \b
    Start with:
      flash-tutorial list                    the versions and their ideas
      flash-tutorial run v03 --causal        one version on random tensors: right? what does it cost?
      flash-tutorial compare all sdpa        all of them and PyTorch, side by side
      flash-tutorial bench --stored          their times on a GPU, as measured; without --stored: on yours
      flash-tutorial tune v09                which of v09's tile shapes is the fastest on this GPU
      flash-tutorial diff v03                what v03 changed from v02
      flash-tutorial profile v03             what it does to the machine, by source line; on a GPU by ncu
      flash-tutorial inspect v03 v04         registers, occupancy and instructions, as nvcc makes them
      flash-tutorial hardware --stored       the emulator's counters beside a GPU's: are they right?
      flash-tutorial roofline                a picture of all versions under a GPU's ceilings
      flash-tutorial plot                    a picture of their speed over the sequence length
      flash-tutorial doctor                  what this machine can do, and what it lacks

    A version goes by its number (v03, v3, 3), its full name (v03_warp_local) or its word (warp_local). The path of a
    .cu of your own is taken too: copy a kernel, change it, run it. v04:pad=0 is v04 with one constant set otherwise
    (list --variants).""",
)
def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # where Δ or µ has no place in the terminal's encoding, ? stands
            stream.reconfigure(errors="replace")


@contextlib.contextmanager
def _asked_wrongly() -> Iterator[None]:
    """What is raised for a wrong request ends the command with status 2 and the exception's words."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from error


# ---------------------------------------------------------------------------------------------------------- in common

SUFFIXES = {".txt": "simple", ".md": "github", ".html": "html", ".csv": "csv", ".json": "json"}


def _numbers(ctx: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = text.split(",")
    if not all(re.fullmatch(r"\s*\d{1,18}\s*", word, re.ASCII) for word in words):
        things = "head sizes" if parameter.name == "head_dims" else "lengths"
        raise click.BadParameter(
            f"{reprlib.repr(text)} is no list of {things}: whole numbers of up to 18 digits with commas between them "
            "are accepted"
        )
    return tuple(dict.fromkeys(map(int, words)))


def _dtype(help: str) -> Callable:
    return click.option("--dtype", type=click.Choice(DTYPES), help=help)


_like = click.option("--like", metavar="VERSION", help="The version whose dtypes and head sizes your .cu has.")
_batch_size = click.option("--batch-size", "batch", type=click.IntRange(1), help="Sequences in the batch.")
_seq_lens = click.option(
    "--seq-lens", "seqs", metavar="N,N,...", callback=_numbers, help="Lengths, of queries and keys alike."
)
_warmup = click.option(
    "--warmup", metavar="N", type=click.IntRange(0), help="Calls before the first that is timed.  [default: 5]"
)
_repetitions = click.option(
    "--repetitions", metavar="N", type=click.IntRange(1), help="Timed calls of each.  [default: 30]"
)
_stored = click.option("--stored", is_flag=True, help="Show what is stored and measure nothing: needs no GPU.")
_stored_gpu = click.option(
    "--gpu", metavar="NAME", help="With --stored: whose times, h200 for example.  [default: every GPU's]"
)
_format = click.option(
    "--format", "fmt", type=click.Choice(["simple", "github", "json"]), default="simple", show_default=True
)
_format_or_suffix = click.option(
    "--format", "fmt", type=click.Choice(list(SUFFIXES.values())), help="[default: by --out's suffix, or simple]"
)
_out = click.option(
    "--out", metavar="FILE", type=click.Path(path_type=Path), help=f"Write there: {', '.join(SUFFIXES)}."
)


def _check_stored(stored: bool, gpu: str | None, measuring: Mapping[str, object]) -> None:
    """ValueError for --gpu without --stored, and for those options beside it that only a measurement heeds."""
    if gpu is not None and not stored:
        raise ValueError("--gpu chooses among stored times: it needs --stored")
    given = [f"--{name}" for name, value in measuring.items() if value is not None and value is not False]
    if stored and given:
        raise ValueError(f"--stored measures nothing: {' and '.join(given)} cannot go with it")


def _tell(said: Iterable[str], tables: Sequence, stored: bool, status: int) -> None:
    """Says what there is to say beside the tables, and ends a command that has none."""
    for line in said:
        click.echo(line, err=True)
    if not tables:
        ctx = click.get_current_context()
        missing = f"nothing of this is stored: `{ctx.command_path}` measures it on a GPU"
        click.echo(missing if stored else "nothing measured", err=True)
        ctx.exit(status or WRONG)


def _output_format(fmt: str | None, out: Path | None) -> str:
    """The format to write, once it is clear that `out` can be written; else ValueError, before anything has run."""
    if out is None:
        return fmt or "simple"
    _check_out(out, {suffix: f"{suffix} ({name})" for suffix, name in SUFFIXES.items()})
    if fmt not in (None, SUFFIXES[out.suffix]):
        raise ValueError(f"--out {out} is for {SUFFIXES[out.suffix]}, but --format is {fmt}: leave one of them out")
    return SUFFIXES[out.suffix]


def _check_out(out: Path, suffixes: Mapping[str, str]) -> None:
    """ValueError if `out` cannot be written, or ends in none of the suffixes, which are given with their meanings."""
    accepted = ", ".join(suffixes.values())
    if out.is_dir():
        raise ValueError(f"--out {out} is a directory: a file name is needed, ending in {accepted}")
    if out.suffix not in suffixes:
        raise ValueError(f"--out {out} ends in {out.suffix or 'no suffix'!r}: accepted are {accepted}")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: there is no directory {out.parent}")
    if not os.access(out.absolute().parent, os.W_OK):
        raise ValueError(f"--out {out}: the directory {out.parent} cannot be written to")


def _show(text: str, out: Path | None, rows: int) -> None:
    """Prints a table, or writes it to `out` and says how many rows it has."""
    if out is None:
        click.echo(text)
        return
    with _asked_wrongly():
        files.write(out, text + "\n")
    click.echo(f"{out}: {rows} rows", err=True)


# ---------------------------------------------------------------------------------------------------------- list


@main.command(
    "list",
    short_help="The versions and their ideas.",
    help=_teach(
        """Lists the versions in order, each with the one idea that it adds to its parent.

    \b
    Examples:
      flash-tutorial list
      flash-tutorial list --format json | python -m json.tool

    JSON gives objects with name, number, title, idea, parent, dtypes, head_dims (the compiled head sizes; smaller ones
    are padded), min_arch (the oldest compute capability), cuda_built and emulated (whether the library for a GPU, and
    for the emulator, is built from the source as it is now; what is not is built when first used).

    A version with --variants can be named with constants of its kernel set otherwise, as in v04:pad=0 or
    v04:copies=scalar,block_q=32, to see what one decision is worth.
    """,
        "the versions were listed",
        "does not occur",
    ),
)
@click.option("--variants", is_flag=True, help="What can be set in each version instead of the versions.")
@_format
def list_(variants: bool, fmt: str) -> None:
    if variants:
        options = [(version, option) for version in VERSIONS for option in version.options]
        if fmt == "json":
            data = [{"version": v.name, "option": o.name, "values": o.words, "meaning": o.meaning} for v, o in options]
            click.echo(json.dumps(data, indent=2, ensure_ascii=False))
            return
        rows = [[version.name, option.name, ", ".join(option.words), option.meaning] for version, option in options]
        headers = ["version", "option", "values, its own first", "what it sets"]
        click.echo(tabulate(rows, headers, tablefmt=fmt, disable_numparse=True))
        return
    entries = [
        {
            "name": version.name,
            "number": version.number,
            "title": version.title,
            "idea": version.idea,
            "parent": version.parent,
            "dtypes": list(version.dtypes),
            "head_dims": list(version.head_dims),
            "min_arch": version.min_arch,
            "cuda_built": build.find_library(version, "cuda") is not None,
            "emulated": build.find_library(version, "emulated") is not None,
        }
        for version in VERSIONS
    ]
    if fmt == "json":
        click.echo(json.dumps(entries, indent=2, ensure_ascii=False))
        return
    built = {True: "built", False: "not yet"}
    rows = [
        [e["name"], e["idea"], ", ".join(e["dtypes"]), built[e["cuda_built"]], built[e["emulated"]]] for e in entries
    ]
    widths = [None, 46, 10, None, None] if fmt == "simple" else None
    click.echo(tabulate(rows, ["version", "idea", "dtypes", "CUDA", "emulator"], tablefmt=fmt, maxcolwidths=widths))


# ---------------------------------------------------------------------------------------------------------- run


_SHAPE_OPTIONS = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "seed")


def _problem_options(command: Callable) -> Callable:
    """The options that describe one attention problem; the command gets a function that makes it as `make_problem`."""

    @click.option("--batch", type=int, default=1, show_default=True, help="Sequences in the batch.")
    @click.option("--heads", type=int, default=2, show_default=True, help="Query heads, a multiple of --kv-heads.")
    @click.option("--kv-heads", type=int, help="Key/value heads.  [default: as many as --heads]")
    @click.option("--queries", type=int, default=100, show_default=True, help="Queries M.")
    @click.option("--keys", type=int, default=127, show_default=True, help="Keys N.")
    @click.option("--head-dim", type=int, default=64, show_default=True, help="Size D of a head, 1 to 128.")
    @_dtype("[default: the first version's first]")
    @click.option("--causal", is_flag=True, help="Query i sees keys j <= i + N - M.")
    @click.option("--scale", type=float, help="Any finite number.  [default: 1/sqrt(D)]")
    @click.option(
        "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="cpu emulates."
    )
    @click.option("--seed", type=int, default=0, show_default=True, help="Of the normal random tensors.")
    @_like
    @click.option("--input", "path", metavar="FILE.safetensors", help="Tensors q, k, v instead of random ones.")
    @click.option("--prefix", help="Read PREFIX.q, PREFIX.k, PREFIX.v from --input.")
    @functools.wraps(command)
    def wrapper(*args, path: str | None, prefix: str | None, **options):
        chosen = {name: options.pop(name) for name in (*_SHAPE_OPTIONS, "dtype", "causal", "scale", "device")}

        def make_problem(default_dtype: str, **other_defaults):
            from flash_tutorial.problem import Problem

            source = click.get_current_context().get_parameter_source
            if path is None:
                if prefix is not None:
                    raise ValueError(f"--prefix {prefix} needs --input, the file that holds the tensors")
                others = {n: v for n, v in other_defaults.items() if source(n) is ParameterSource.DEFAULT}
                return Problem(**chosen | {"dtype": chosen["dtype"] or default_dtype} | others)
            given = [name for name in _SHAPE_OPTIONS if source(name) is not ParameterSource.DEFAULT]
            if given:
                names = ", ".join("--" + name.replace("_", "-") for name in given)
                raise ValueError(f"{names} cannot be chosen with --input: the file's tensors have shapes of their own")
            rest = {name: chosen[name] for name in ("dtype", "causal", "scale", "device")}
            return Problem.from_file(path, prefix, **rest)

        return command(*args, make_problem=make_problem, **options)

    return wrapper


@main.command(
    short_help="One version on your tensors or random ones: right? at what cost?",
    help=_teach(
        """Runs one version, or your own .cu, on random tensors or on those of a file, and holds it against float64.
    On a CPU the kernel runs in the emulator, which counts what it does to memory and reports races, reads of unwritten
    memory, stray accesses and deadlocks by source line. On a GPU it is timed.

    \b
    Examples:
      flash-tutorial run v03 --queries 64 --keys 200 --causal --lines
      flash-tutorial run ./my_v03.cu --input tests/data/minilm_qkv.safetensors --prefix layer0

    A .cu is compiled when it is first run and again whenever it has changed. Its dtypes and head sizes are those of the
    version in its file name (my_v03.cu), or of --like VERSION.
    """,
        "right: the error is at most twice that of PyTorch in the same precision, plus a little",
        "wrong, the emulator has a finding, or the kernel does not compile or run",
    ),
)
@click.argument("version", metavar="VERSION|PATH.cu")
@_problem_options
@click.option("--lines", is_flag=True, help="The counters by source line too (on a CPU).")
@click.option("--format", "fmt", type=click.Choice(["simple", "json"]), default="simple", show_default=True)
@click.pass_context
def run(ctx: click.Context, version: str, like: str | None, make_problem: Callable, lines: bool, fmt: str) -> None:
    from flash_tutorial import compare as comparing

    with _asked_wrongly():
        if version in (*comparing.REFERENCES, "all"):
            raise ValueError(f"{version} is not one version: `flash-tutorial compare` takes it")
        problem = make_problem(comparing.find_version(version, like).dtypes[0])
        if lines and problem.device != "cpu":
            raise ValueError("--lines counts in the emulator: it needs --device cpu")
        comparison = comparing.compare(version, problem, like=like)
    row = comparison[0]
    if fmt == "json":
        click.echo(comparing.to_json(comparison, lines=lines))
    else:
        click.echo(comparing.describe(comparison, lines=lines))
    ctx.exit(RIGHT if row.status == "right" else WRONG)


# ---------------------------------------------------------------------------------------------------------- compare


@main.command(
    short_help="Versions and PyTorch's attention side by side.",
    help=_teach(
        """Puts versions, your own .cu files and PyTorch's attention side by side, all on the same tensors. Each is held
    against float64. On a CPU the table has the emulator's counters, on a GPU times and speeds.

    \b
    NAMES are versions, paths of .cu files, `all` (each version that takes the dtype), and
      baseline        softmax(q kT) v in plain PyTorch, in the inputs' precision
      sdpa            scaled_dot_product_attention, its own choice of kernel
      sdpa_flash, sdpa_efficient, sdpa_math, sdpa_cudnn    one kernel of it

    \b
    Examples:
      flash-tutorial compare v00 v02 v04 sdpa --queries 128 --keys 128
      flash-tutorial compare all sdpa --device cuda --queries 1024 --keys 1024 --out table.md

    \b
    Columns on a CPU, each as Nsight Compute counts it on a GPU:
      global load, store bytes    asked for by the lanes, whatever the caches then do
      sectors/request             32-byte sectors that one access of a warp touches: at best 4 for
                                  4-byte words, 16 for 16-byte ones
      shared wavefronts           passes over the 32 banks of shared memory
      bank conflicts              those of them that a better layout would save
      barriers, shuffles          counted once a warp
      emul. s                     seconds in the emulator, which say nothing of a GPU

    A contender that fails keeps its row, which says why, and the others go on.
    """,
        "every contender is right",
        "one is wrong, has a finding, or failed",
    ),
)
@click.argument("names", nargs=-1, required=True)
@_problem_options
@click.option(
    "--baseline", metavar="NAME", help="What speeds are relative to.  [default: the first of PyTorch's, or of all]"
)
@_format_or_suffix
@_out
@click.pass_context
def compare(
    ctx: click.Context,
    names: tuple[str, ...],
    like: str | None,
    make_problem: Callable,
    baseline: str | None,
    fmt: str | None,
    out: Path | None,
) -> None:
    with _asked_wrongly():
        fmt = _output_format(fmt, out)

        from flash_tutorial import compare as comparing

        named = [each for each in names if each not in (*comparing.REFERENCES, "all")]
        found = [comparing.find_version(each, like) for each in named]
        problem = make_problem((found or VERSIONS)[0].dtypes[0])
        result = comparing.compare(names, problem, baseline=baseline, like=like)
    _show(comparing.render(result, fmt), out, len(result))
    ctx.exit(RIGHT if result.right else WRONG)


# ---------------------------------------------------------------------------------------------------------- bench


@main.command(
    short_help="Times on a GPU, side by side with PyTorch and others.",
    help=_teach(
        """Times versions on a GPU, beside explicit PyTorch (baseline), its fused kernels (sdpa_flash, sdpa_cudnn,
    sdpa_efficient, sdpa_math) and whichever of flash-attn and xFormers is installed: in one process, on the same random
    tensors, in turns, with the L2 cache flushed. A contender is first held against float64; a wrong one gets no time.
    Times are added to results/<gpu>.json, with the environment and a hash of the kernel; those of your own .cu are not.

    NAMES are versions, variants (v04:pad=0), paths of .cu files, `all` (each version that takes the dtype; the
    default), PyTorch's as in `compare` (baseline, sdpa_flash, ...), flash_attn, flash_attn_3, flash_attn_4, xformers.

    \b
    Suites:
@suites
    The options that describe problems change a suite's. `small`, the default, takes under 30 seconds.

    \b
    Examples:
      flash-tutorial bench all --suite pedagogical
      flash-tutorial bench v04 v04:pad=0 v04:copies=scalar --only --suite pedagogical --baseline v04
      flash-tutorial bench --suite blog --baseline sdpa_flash --out blog.md
      flash-tutorial bench --stored --suite pedagogical

    \b
    Columns:
      Δ %            time more than the baseline's (-: less); `noise` where that is within the spread
      % of ceiling   of the TFLOP/s that a matrix product of the dtype reaches in the same run
      ratio          times as fast as the baseline
      ± %            half of what lies between the 20th and 80th percentile of the times
    Over several lengths also the speed in percent of the baseline at each, and the harmonic mean.

    Without --warmup and --repetitions, of which both are kept to exactly, a kernel that takes seconds has fewer.
    Ctrl-C shows and keeps what was measured until then (exit status 130).
    """.replace("@suites", "\n".join(f"      {name:<11} {suite}" for name, suite in SUITES.items())),
        "every version, and whatever was asked for by name, is right and has a time",
        "one is wrong or failed, or nothing is stored",
    ),
)
@click.argument("names", nargs=-1, metavar="[NAMES|all]...")
@click.option("--suite", metavar="SUITE", default="small", show_default=True, help="The grid of problems, see above.")
@_batch_size
@click.option("--num-heads", "heads", type=click.IntRange(1), help="Query heads, a multiple of --kv-heads.")
@click.option("--kv-heads", type=click.IntRange(1), help="Key/value heads.  [default: as many as --num-heads]")
@click.option("--head-dim", type=click.IntRange(1), help="Size D of a head.")
@_seq_lens
@_dtype("Of the tensors.")
@click.option("--causal/--full", "causal", default=None, help="Query i sees keys j <= i only, or all.")
@_warmup
@_repetitions
@click.option("--baseline", metavar="NAME", help="Whom the others are compared with.  [default: baseline]")
@click.option("--only", is_flag=True, help="Nobody beside those named.")
@_like
@click.option("--save/--no-save", "keep", default=True, help="Add the times to results/<gpu>.json.  [default: save]")
@_stored
@_stored_gpu
@_format_or_suffix
@_out
@click.pass_context
def bench(
    ctx: click.Context,
    names: tuple[str, ...],
    suite: str,
    head_dim: int | None,
    causal: bool | None,
    warmup: int | None,
    repetitions: int | None,
    baseline: str | None,
    only: bool,
    like: str | None,
    keep: bool,
    stored: bool,
    gpu: str | None,
    fmt: str | None,
    out: Path | None,
    **chosen: object,
) -> None:
    chosen |= {"head_dims": head_dim and (head_dim,), "causals": None if causal is None else (causal,)}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    with _asked_wrongly():
        fmt = _output_format(fmt, out)
        _check_stored(stored, gpu, {"warmup": warmup, "repetitions": repetitions})

        from flash_tutorial import benchmark, results, timetable
        from flash_tutorial.reference import PEERS

        peers = tuple(PEERS) if stored else None
        plan = benchmark.plan_of(names, suite, baseline=baseline, only=only, like=like, peers=peers, **chosen)
        if stored:
            rows = benchmark.stored(plan, gpu)
        else:
            benchmark.check_gpu()
            if keep:
                results.check("times", results.environment()["name"])
    if stored:
        status, left_out, said = RIGHT, plan.left_out, []
        if not rows and (elsewhere := benchmark.suites_stored(plan, gpu)):
            said = [f"stored are times of --suite {', '.join(elsewhere)}"]
    else:
        run = benchmark.measure(plan, warmup=warmup, repetitions=repetitions)
        rows, left_out = run.shown(), run.left_out
        status = INTERRUPTED if run.interrupted else RIGHT if benchmark.right(plan, run) else WRONG
        said = ["interrupted: this is what was measured until then"] * run.interrupted
        if keep:
            try:
                said.append(f"kept in {benchmark.save(run)}")
            except (ValueError, OSError) as error:  # the table is shown all the same
                said.append(f"not kept: {error}")
                status = status or WRONG
    tables = timetable.tables_of(rows, plan.contenders, plan.baseline)
    _tell(said, tables, stored, status)
    _show(timetable.render(tables, fmt, left_out), out, len(rows))
    ctx.exit(status)


# ---------------------------------------------------------------------------------------------------------- tune


@main.command(
    short_help="Which tile shapes of a version are the fastest on this GPU.",
    help=_teach(
        """Times every tile shape of a version that has several, by the rules of `bench`: on the same random tensors,
    each held against float64 first, in turns. From then on the version takes, for each problem on this GPU, the shape
    that was the fastest at its head size and mask and the nearest length.

    Times are kept in results/tuning/<gpu>.json, each problem as soon as it is done: Ctrl-C (exit status 130) loses one
    problem, and the next run goes on there. What was measured with the kernel as it is now is not measured again. Times
    of some --tiles only, or of a kernel that has changed since, are shown but not used.

    Unless told otherwise the problems are those of `bench --suite paper`. A problem of less than half as many queries
    (B*H*N) is not taken to be alike.

    \b
    Examples:
      flash-tutorial tune v09
      flash-tutorial tune v09 --tiles 64x64,64x32,32x32 --head-dims 128 --dtype float16 --causal
      flash-tutorial tune v09 --seq-lens 512,1024 --batch-size 1 --num-heads 32
      flash-tutorial tune v09 --stored --format github

    \b
    Columns:
      N          the length
      64x64 ...  TFLOP/s; the best is marked, and what differs from it by less than the spread
      own        what the kernel chooses by itself, as it does on a GPU that was not tuned
      loses      how much longer that takes than the best
    """,
        "every tile shape that this GPU can launch is right",
        "one is wrong or failed, the kernel does not compile, or nothing is stored",
    ),
)
@click.argument("version", metavar="VERSION|PATH.cu")
@click.option("--tiles", metavar="WORD,WORD,...", help="Some of its tile shapes (list --variants).  [default: all]")
@click.option("--head-dims", metavar="D,D,...", callback=_numbers, help="Compiled head sizes.  [default: 64,128]")
@_seq_lens
@_dtype("[default: bfloat16]")
@click.option("--causal/--full", "causal", default=None, help="With the mask, or without.  [default: both]")
@_batch_size
@click.option("--num-heads", "heads", type=click.IntRange(1), help="Heads.")
@_warmup
@_repetitions
@click.option("--force", is_flag=True, help="Measure again what has been measured.")
@click.option("--like", metavar="VERSION", help="The version whose tile shapes your .cu has.")
@_stored
@_stored_gpu
@_format
@click.pass_context
def tune(
    ctx: click.Context,
    version: str,
    tiles: str | None,
    causal: bool | None,
    warmup: int | None,
    repetitions: int | None,
    force: bool,
    like: str | None,
    stored: bool,
    gpu: str | None,
    fmt: str,
    **chosen: object,
) -> None:
    chosen |= {"causals": None if causal is None else (causal,)}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    with _asked_wrongly():
        _check_stored(stored, gpu, {"force": force, "warmup": warmup, "repetitions": repetitions})

        from flash_tutorial import tune as tuning

        words = None if tiles is None else [word.strip() for word in tiles.split(",")]
        plan = tuning.plan_of(version, tiles=words, like=like, **chosen)
        if stored:
            rows, said, status = tuning.stored(plan.version, plan.shapes if chosen else None, gpu), [], RIGHT
        else:
            try:
                run = tuning.measure(plan, force=force, warmup=warmup, repetitions=repetitions)
            except build.BuildError as error:
                click.echo(error, err=True)
                ctx.exit(WRONG)
            rows, said = run.rows, run.said
            status = INTERRUPTED if run.interrupted else RIGHT if run.right else WRONG
    tables = tuning.tables_of(rows, plan.tiles)
    _tell(said, tables, stored, status)
    click.echo(tuning.render(tables, fmt))
    ctx.exit(status)


# ---------------------------------------------------------------------------------------------------------- diff


@main.command(
    short_help="What a version changed from its parent.",
    help=_teach(
        """Shows what a version changed from its parent, or from OTHER: a unified diff, and how many lines it added and
    removed.

    \b
    Examples:
      flash-tutorial diff v03
      flash-tutorial diff ./my_v03.cu v03        what you changed

    A .cu of your own has the parent of the version in its file name, or of --like VERSION.
    """,
        "the difference was shown",
        "does not occur",
    ),
)
@click.argument("version", metavar="VERSION|PATH.cu")
@click.argument("other", required=False)
@click.option("--like", metavar="VERSION", help="The version whose parent your .cu has.")
@click.option(
    "--format",
    "fmt",
    type=click.Choice(["plain", "html"]),
    default="plain",
    show_default=True,
    help="plain is coloured on a terminal, unless NO_COLOR is set.",
)
def diff(version: str, other: str | None, like: str | None, fmt: str) -> None:
    from flash_tutorial.diff import diff as difference

    with _asked_wrongly():
        found = difference(version, other, like)
    if fmt == "html":
        click.echo(found.html())
        return
    colours = {"+": "green", "-": "red", "@": "cyan"}
    colour = False if os.environ.get("NO_COLOR") else None  # None: if stdout is a terminal
    for line in found.lines:
        click.secho(line, fg=colours.get(line[:1]), color=colour)
    click.secho(found.summary, bold=True, color=colour)


# ---------------------------------------------------------------------------------------------------------- profile

#: What a GPU is given to do, unless told otherwise: the emulator's small problem would leave it idle.
_ON_A_GPU = {"batch": 4, "heads": 12, "queries": 2048, "keys": 2048}


@main.command(
    "profile",
    short_help="What a version does to the machine, by source line.",
    help=_teach(
        """Looks at one call of each version. On a CPU the emulator counts, by source line and in total. On a GPU
    Nsight Compute (ncu) counts the same quantities, and tells what depends on the chip: duration, TFLOP/s, bytes from
    DRAM, occupancy and what limits it, registers, shared memory, and the share of the warps' time that each line takes.
    Beside each figure stands what it says.

    NAMES are versions, their variants, paths of .cu files, or `all`: every version that is one kernel launch (and takes
    --dtype, if that is given). v00 and PyTorch's attention launch several, and are refused.

    \b
    Examples:
      flash-tutorial profile v03
      flash-tutorial profile v04 v04:pad=0 --device cuda
      flash-tutorial profile v04 --device cuda --save v04.ncu-rep      then: ncu-ui v04.ncu-rep
      flash-tutorial profile all --device cuda

    On a GPU a problem has --batch 4 --heads 12 --queries 2048 --keys 2048 unless told otherwise, and what `all` finds
    is kept in results/profiles/<gpu>.json. A launch of more than 20 ms is not looked at by line, unless with --save.
    """,
        "every version was profiled",
        "a kernel does not compile or fails, or the emulator has a finding; the others are shown",
    ),
)
@click.argument("names", nargs=-1, required=True)
@_problem_options
@click.option(
    "--save",
    metavar="FILE.ncu-rep",
    type=click.Path(path_type=Path),
    help="Keep ncu's report on one version, with all its sections (on a GPU).",
)
@click.option(
    "--keep/--no-keep", default=None, help="Add what a GPU says to results/profiles.  [default: keep if `all`]"
)
@_format
@click.pass_context
def profile(
    ctx: click.Context,
    names: tuple[str, ...],
    like: str | None,
    make_problem: Callable,
    save: Path | None,
    keep: bool | None,
    fmt: str,
) -> None:
    from flash_tutorial import profile as profiling

    with _asked_wrongly():
        taken = profiling.profile_all(
            names,
            lambda dtype: make_problem(dtype, **(_ON_A_GPU if ctx.params["device"] == "cuda" else {})),
            like=like,
            save=save,
            keep=keep,
            say=functools.partial(click.echo, err=True),
        )
    if taken.profiles:
        click.echo(profiling.describe(taken.profiles, fmt))
    ctx.exit(RIGHT if not taken.failures else WRONG)


# ---------------------------------------------------------------------------------------------------------- inspect


@main.command(
    "inspect",
    short_help="Registers, shared memory, occupancy and instructions.",
    help=_teach(
        """Compiles a version for one architecture and shows what it takes and what it became; with OTHER, both and
    their differences. No GPU is needed: ptxas (of nvcc) tells registers, static shared memory, stack and spills,
    nvdisasm the instructions, and a tiny launch in the emulator the threads and the dynamic shared memory of a block.
    Occupancy follows from these by CUDA's rules.

    \b
    Examples:
      flash-tutorial inspect v04
      flash-tutorial inspect v03 v04 --arch sm_80 --head-dim 128
      flash-tutorial inspect v04 v04:pad=0
      flash-tutorial inspect ./my_v03.cu --sass | less

    \b
    How to read it:
      registers, shared   an SM has 65,536 registers and, by --arch, 100 to 228 KiB of shared memory
                          for the blocks that it holds at a time
      occupancy           warps that an SM holds, of those it could; `limited by` says what runs out
      spills              registers moved to memory for want of room: LDL and STL in the code
      instructions        as they stand in the code: one in a loop counts once. FFMA, HMMA and HGMMA
                          are the arithmetic, MUFU exponentials and reciprocals, LDSM is ldmatrix,
                          LDGSTS cp.async; IADD3, IMAD, LOP3, SHF and MOV are mostly addresses

    Without nvdisasm all but the instructions is shown. Without nvcc a library that was built before is looked into,
    which takes cuobjdump. All of them are in NVIDIA's CUDA toolkit, and on PyPI:

    \b
      pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump
    """,
        "the kernels were inspected",
        "a kernel does not compile: nvcc's message says why",
    ),
)
@click.argument("version", metavar="VERSION|PATH.cu")
@click.argument("other", required=False)
@click.option("--arch", metavar="sm_NN", help="sm_80, sm_86, sm_89, sm_90 or sm_90a.  [default: sm_90]")
@click.option("--head-dim", type=int, default=64, show_default=True, help="Whose kernels to show.")
@_dtype("[default: each version's first]")
@_like
@click.option("--sass", is_flag=True, help="The machine code too, under its source lines.")
@_format
@click.pass_context
def inspect_(
    ctx: click.Context,
    version: str,
    other: str | None,
    arch: str | None,
    head_dim: int,
    dtype: str | None,
    like: str | None,
    sass: bool,
    fmt: str,
) -> None:
    from flash_tutorial import inspect as inspecting
    from flash_tutorial import registry

    with _asked_wrongly():
        found = [registry.resolve(name, like) for name in (version, other) if name is not None]
        try:
            inspections = [inspecting.inspect(each, arch, head_dim, sass, dtype) for each in found]
        except build.BuildError as error:
            click.echo(error, err=True)
            ctx.exit(WRONG)
    click.echo(inspecting.describe(inspections, fmt, sass))


# ---------------------------------------------------------------------------------------------------------- hardware


@main.command(
    short_help="The emulator's counters beside a GPU's.",
    help=_teach(
        """Holds the emulator against the GPU of this machine: runs versions on a few small problems in the emulator
    and under Nsight Compute, and puts both counts of each memory access, bank conflict, tensor-core instruction,
    barrier and shuffle side by side. They should be equal; what is not is explained, or is a mistake of the emulator's.

    \b
    NAMES are versions, variants, paths of .cu files, or `all`.

    \b
    Examples:
      flash-tutorial hardware
      flash-tutorial hardware v03 v04
      flash-tutorial hardware --stored             what was measured before: needs no GPU

    The figures are kept in results/counters/, but for those of your own .cu files. Needs ncu, a part of NVIDIA's
    CUDA toolkit. kernels/emulator/README.md says which of its metrics each counter is held against.
    """,
        "the emulator and the GPU agree, or it is explained why not",
        "a difference has no explanation, or a version could not be measured",
    ),
)
@click.argument("names", nargs=-1, metavar="[NAMES|all]...")
@_stored
@click.option("--keep/--no-keep", default=True, show_default=True, help="Add the figures to results/counters/.")
@_format
@click.pass_context
def hardware(ctx: click.Context, names: tuple[str, ...], stored: bool, keep: bool, fmt: str) -> None:
    from flash_tutorial import hardware as comparing

    say = functools.partial(click.echo, err=True)
    with _asked_wrongly():
        calls = comparing.calls(names or ("all",))
        rows = comparing.stored(calls, say=say) if stored else comparing.measure(calls, keep=keep, say=say)
    _tell([], rows, stored, RIGHT)
    click.echo(comparing.describe(rows, fmt))
    explained = not comparing.unexplained(rows)
    ctx.exit(RIGHT if explained and (stored or len(rows) == len(calls)) else WRONG)


# ---------------------------------------------------------------------------------------------------------- pictures


_gpu_option = click.option(
    "--gpu",
    metavar="NAME",
    help="Whose figures, by the name of its file in results/.  [default: the GPU measured last]",
)


@main.command(
    short_help="A picture: versions under a GPU's ceilings.",
    help=_teach(
        """Draws where versions lie under the ceilings of a GPU: TFLOP/s against FLOP per byte of its DRAM, both
    logarithmic. A point close to the sloping ceiling waits for memory, one close to a flat ceiling computes as fast as
    the GPU can, and one far below both wastes its time on something else. Drawn from stored figures: needs no GPU.

    \b
    Examples:
      flash-tutorial roofline
      flash-tutorial roofline v03 v04 v04:pad=0 --gpu h200 --out roofline.png

    Times are those of `flash-tutorial bench`, bytes those of `flash-tutorial profile` or, where it has not been run,
    counted: inputs and outputs once, and twice what else a kernel writes to global memory. The picture says which.
    """,
        "the picture was drawn",
        "the emulator, which counts bytes, cannot be built",
    ),
)
@click.argument("names", nargs=-1, metavar="[VERSIONS|all]...")
@_gpu_option
@click.option("--out", type=click.Path(path_type=Path), default="roofline.svg", show_default=True, help=".svg or .png.")
def roofline(names: tuple[str, ...], gpu: str | None, out: Path) -> None:
    _draw(out, lambda charts: charts.roofline(names, gpu))


@main.command(
    short_help="A picture: TFLOP/s over the sequence length.",
    help=_teach(
        """Draws how fast versions and references are over the sequence length, in TFLOP/s, with the spread of their
    times: one panel for each family of problems of a suite. Drawn from stored figures: needs no GPU.

    \b
    Examples:
      flash-tutorial plot
      flash-tutorial plot v04 sdpa_efficient --suite pedagogical --out speed.png

    Suites and times are those of `flash-tutorial bench`. Hollow points were measured before the kernel's last change.
    """,
        "the picture was drawn",
        "does not occur",
    ),
)
@click.argument("names", nargs=-1, metavar="[NAMES|all]...")
@click.option("--suite", metavar="SUITE", default="pedagogical", show_default=True, help="Whose problems.")
@_gpu_option
@click.option("--out", type=click.Path(path_type=Path), default="speed.svg", show_default=True, help=".svg or .png.")
def plot(names: tuple[str, ...], suite: str, gpu: str | None, out: Path) -> None:
    _draw(out, lambda charts: charts.speeds(names, suite, gpu))


def _draw(out: Path, make: Callable) -> None:
    """Writes the picture that `make` makes of the stored figures, and says what it shows and what it leaves out."""
    from flash_tutorial import charts

    with _asked_wrongly():
        _check_out(out, {suffix: suffix for suffix in charts.SUFFIXES})
        try:
            picture = make(charts)
            picture.write(out)
        except ModuleNotFoundError as error:
            raise ValueError(f"{error}: pictures are drawn with matplotlib (pip install matplotlib)") from error
        except build.BuildError as error:
            click.echo(error, err=True)
            click.get_current_context().exit(WRONG)
    if picture.missing:
        click.echo(f"left out, as nothing is stored of them: {', '.join(picture.missing)}", err=True)
    click.echo(f"{out}: {picture.alt}")


# ---------------------------------------------------------------------------------------------------------- doctor


@main.command(
    short_help="What this machine has, lacks, and how to mend it.",
    help=_teach(
        """Looks at this machine: Python, PyTorch, compilers, GPU, and which kernels are built. Then runs the first
    version in the emulator. For whatever is missing it prints the command that mends it.

    \b
    Examples:
      flash-tutorial doctor
      flash-tutorial doctor --format json

    """,
        "the emulator works here, and with it every version, with or without a GPU",
        "something that the emulator needs is missing",
    ),
)
@click.option("--format", "fmt", type=click.Choice(["simple", "json"]), default="simple", show_default=True)
@click.pass_context
def doctor(ctx: click.Context, fmt: str) -> None:
    from flash_tutorial import doctor as examining

    checks = examining.examine(say=functools.partial(click.echo, err=True))
    if fmt == "json":
        click.echo(examining.to_json(checks))
    else:
        click.echo(examining.describe(checks))
    ctx.exit(RIGHT if examining.works(checks) else WRONG)
