"""Makes the virtual environment that the Makefile's targets run in, and does nothing where it is already right.

`make` runs this, after tools/check.sh, with the interpreter the reader chose. It needs only the standard library.

A PyTorch >= 2.11 that this interpreter imports is kept: the environment sees it, and pip leaves it out.

`RECORD`, a file in the environment, says who made it and which requirements are in it. It names the requirements only
when pip is done, so one whose making was interrupted is known and made afresh (what pip downloaded is in pip's cache).
An environment that the reader put there is installed into, never removed.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = "flash-tutorial.json"
OLDEST_TORCH = (2, 11)

# Prints, as JSON, the version of the PyTorch that an interpreter imports and the folders it finds packages in.
PROBE = """
import json, pathlib, sys, torch
folders = [folder for folder in sys.path if pathlib.Path(folder).name in ("site-packages", "dist-packages")]
folders.append(str(pathlib.Path(torch.__file__).parents[1]))
print(json.dumps({"version": torch.__version__, "folders": list(dict.fromkeys(folders))}))
"""

# The sizes are those of torch 2.13.0 for Linux x86-64 and CPython 3.12, with all that pip downloads for it.
ABOUT_TORCH = """\
        PyTorch is most of it. PyPI's for Linux on x86-64 carries CUDA: 2.7 GB to download, 4.8 GB on disk.
        - Without an NVIDIA GPU 0.2 GB are enough: stop this with Ctrl-C and add to the make command
          PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
        - To use a PyTorch >= 2.11 that you have, add the interpreter that imports it: PYTHON=/path/to/python"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--requirements", type=Path, default=ROOT / "requirements.txt")
    parser.add_argument("--chosen", action="store_true", help="the reader named this interpreter: use no other one")
    parser.add_argument("--started", type=float, default=time.time(), help="when make began, in seconds since 1970")
    options = parser.parse_args()
    venv = options.venv.absolute()
    python = venv / "bin" / "python"

    def say(text: str) -> None:
        print(f"[{time.time() - options.started:3.0f} s] {text}", flush=True)

    record = read_record(venv)
    base = choose_base(venv, record["made_with"], options.chosen)
    wanted = hashlib.sha256(options.requirements.read_bytes()).hexdigest()
    empty = not venv.exists() or not any(venv.iterdir())
    flaw = "" if empty else find_flaw(venv, record, base, wanted)
    if not empty and not flaw:
        return

    ours = empty or record["made_with"] is not None
    if ours:
        if not empty:
            say(f"{venv.name} {flaw}: making it afresh")
            shutil.rmtree(venv)
        say(f"Making {venv.name} with {base} ({ask(base, 'import sys; print(sys.version)').split()[0]})")
        venv.mkdir(parents=True, exist_ok=True)
        write_record(venv, made_with=base, requirements=None)  # from here on the folder is known as ours to remove
        run([base, "-m", "venv", venv])
        torch = find_torch(base)
    elif runs(python):
        say(f"Installing into {venv.name}, which make did not make")
        torch = find_torch(python)
    else:
        sys.exit(f"{venv} {flaw}, and make did not put it there: move it away, or name another place with VENV=...")

    lines = (line.split("#")[0].strip() for line in options.requirements.read_text().splitlines())
    pins = [line for line in lines if line]
    if torch:
        say(f"Keeping PyTorch {torch['version']} of {base if ours else python}")
        pins = [pin for pin in pins if not re.match(r"torch\b(?!-)", pin)]
    say(f"Installing the packages of {options.requirements.name} with pip")
    if not torch:
        print(ABOUT_TORCH, flush=True)
    if not runs(python, "import pip"):  # environments that uv makes have none
        run([python, "-m", "ensurepip"])
    run([python, "-m", "pip", "install", *shlex.split(os.environ.get("PIP_ARGS", "")), *pins])
    if torch and ours:
        show_packages(python, torch["folders"])  # only now: pip should have seen none of them and installed every pin
    write_record(venv, made_with=base if ours else None, requirements=wanted)
    say(f"{venv.name} is ready")


def choose_base(venv: Path, made_with: str | None, chosen: bool) -> str:
    """What to make `venv` with: the running interpreter if the reader chose it, else the one `venv` was made with."""
    inside = venv.exists() and Path(sys.prefix).resolve() == venv.resolve()  # the reader has activated it
    if made_with and runs(made_with) and (inside or not chosen):
        return made_with
    return str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}") if inside else sys.executable


def find_flaw(venv: Path, record: dict, base: str, wanted: str) -> str:
    """Why the environment cannot be used as it is; empty if it can."""
    if not runs(venv / "bin" / "python"):
        return "has no Python that runs"
    if record["made_with"] not in (None, base):
        return f"was made with {record['made_with']}"
    if record["requirements"] is None:
        return "is unfinished"
    return "" if record["requirements"] == wanted else "was made for other requirements"


def read_record(venv: Path) -> dict:
    """`made_with`: an interpreter, None if make did not make it. `requirements`: their hash, None until pip is done."""
    try:
        return json.loads((venv / RECORD).read_text())
    except FileNotFoundError:
        return {"made_with": None, "requirements": None}


def write_record(venv: Path, **record: str | None) -> None:
    draft = venv / f"{RECORD}.draft"
    draft.write_text(json.dumps(record))
    draft.replace(venv / RECORD)


def find_torch(python: str | Path) -> dict | None:
    """What PROBE says of the PyTorch that `python` imports; None if there is none, or only an old one."""
    answer = ask(python, PROBE)
    torch = json.loads(answer.splitlines()[-1]) if answer else None
    if torch and tuple(map(int, re.findall(r"\d+", torch["version"])[:2])) >= OLDEST_TORCH:
        return torch
    return None


def show_packages(python: Path, folders: list[str]) -> None:
    """Makes `python` find packages in `folders` too, after its own.

    --system-site-packages would do only for an interpreter that is not itself in a virtual environment: it shows the
    packages of the interpreter at the bottom, not those of the environment between.
    """
    own = ask(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
    (Path(own) / "flash_tutorial_kept.pth").write_text("\n".join(folders) + "\n")


def runs(python: str | Path, code: str = "") -> bool:
    return (
        Path(python).exists() and subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    )


def ask(python: str | Path, code: str) -> str | None:
    """What `code` prints under `python`; None if it fails."""
    done = subprocess.run([python, "-c", code], capture_output=True, check=False, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def run(command: list) -> None:
    """Runs a command that says itself what it does, and ends the program if it fails."""
    status = subprocess.run(command, check=False).returncode
    if status:
        sys.exit(f"`{shlex.join(map(str, command[:4]))} ...` failed, see above. Once that is mended, run make again.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Stopped. Run make again to go on: what pip has downloaded is in its cache.")
