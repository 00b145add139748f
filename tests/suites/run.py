"""Run the suites of the frameworks, each in an environment of its own: ``python tests/suites/run.py [name ...]``.

A suite is a folder here with tests and ``requirements.txt``, where each line is one ``pip install``; ``prepare.py`` beside
it runs afterwards, if there is one. The environment is built once and kept under a hash of these in
``$SCAO_CACHE/frameworks`` (default: ``~/.cache/scao``). The wheel of this checkout is installed into it anew each time, so
that what is tested is what a user installs: entry points, recipes and all.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = Path(os.environ.get("SCAO_CACHE") or Path.home() / ".cache" / "scao") / "frameworks"
EVERYWHERE = ["pytest==8.4.2", "pytest-timeout==2.4.0"]


def names() -> list[str]:
    """The suites, by name."""
    return sorted(path.parent.name for path in HERE.glob("*/requirements.txt"))


def installs(name: str) -> list[list[str]]:
    """The arguments of each ``pip install`` of a suite."""
    lines = [shlex.split(line, comments=True) for line in (HERE / name / "requirements.txt").read_text().splitlines()]
    return [line for line in [*lines, EVERYWHERE] if line]


def environment(name: str) -> Path:
    """The folder of the suite's environment, built if there is none for these pins; a build that was cut short is none."""
    plan, prepare = installs(name), HERE / name / "prepare.py"
    recipe = repr((sys.version_info[:2], plan, prepare.read_text() if prepare.exists() else ""))
    place = CACHE / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if (place / "complete").exists():
        return place
    print(f"{name}: building {place}", flush=True)
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    python = str(place / "bin" / "python")
    for arguments in plan:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)
    if prepare.exists():
        subprocess.run([python, str(prepare)], check=True)
    (place / "complete").touch()
    return place


def run(name: str, wheel: Path, material: Path, pytest: list[str]) -> bool:
    """Whether the suite passed."""
    place = environment(name)
    python, start = str(place / "bin" / "python"), time.monotonic()
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)], check=True
    )
    surroundings = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    surroundings |= {
        "PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONSAFEPATH": "1",  # not the checkout's scao_core, which lies in the folder that pytest runs in
        "SCAO_MATERIAL": str(material),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GOMP_SPINCOUNT": "10000",
    }
    # pythonpath without the sources: the wheel is what is imported
    command = [python, "-m", "pytest", "-o", "pythonpath=tests", "-o", "cache_dir=" + str(place / ".pytest"), *pytest]
    passed = subprocess.run([*command, str(HERE / name)], env=surroundings, cwd=ROOT).returncode == 0
    print(f"{name}: {'passed' if passed else 'FAILED'} in {time.monotonic() - start:.0f} s", flush=True)
    return passed


def main() -> int:
    """Run the suites named on the command line, or all; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(names())}; all if none is given")
    parser.add_argument("--pytest", default="", help="further arguments of pytest, in one string")
    parser.add_argument("--only-build", action="store_true", help="build the environments, run nothing")
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - set(names())):
        parser.error(f"no suite {', '.join(unknown)}; there are {', '.join(names())}")
    wanted = given.names or names()
    if given.only_build:
        for name in wanted:
            environment(name)
        return 0
    from material import made  # needs transformers, which the environment of this command has

    with tempfile.TemporaryDirectory() as folder:
        wheels = [sys.executable, "-m", "build", "--wheel", "--outdir", folder, str(ROOT)]
        subprocess.run(wheels, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("*.whl")
        results = {name: run(name, wheel, made(CACHE / "material"), shlex.split(given.pytest)) for name in wanted}
    failed = [name for name, passed in results.items() if not passed]
    print(f"suites: {len(results) - len(failed)} passed" + (f", FAILED: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
