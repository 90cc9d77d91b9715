"""Try axon_nb in environments with the packages of hosted platforms, and say what works there.

    python scripts/platforms.py                  # all of tests/platforms
    python scripts/platforms.py colab kaggle     # these
    python scripts/platforms.py --own sagemaker  # on the platform's Python with its release of torch: 6 GB of packages
    python scripts/platforms.py colab --classes ../colabtools  # in Colab's own kernel, from a checkout of its source

For each, an environment gets the platform's pins and a torch, else that of constraints.txt, then the wheel of this
checkout. It fails if that changes a version that was there; else `platform_paths.py` drives a kernel of it. Results add
up in benchmarks/results/platforms; `python -m scripts.platform_table` writes them into the pages.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLATFORMS = ROOT / "tests" / "platforms"
FOLDER = ROOT / "build" / "platforms"
RESULTS = ROOT / "benchmarks" / "results" / "platforms"
INSTALLATION = "`pip install`"
KEPT_TORCH = "keeps the platform's torch"
_LIMIT_S = 900


@dataclass
class Outcome:
    """What became of one platform."""

    title: str
    date: str = field(default_factory=lambda: dt.date.today().isoformat())
    versions: dict[str, str] = field(default_factory=dict)
    """What ran, of Python, torch, ipython and ipykernel."""
    own: dict[str, str] = field(default_factory=dict)
    """The platform's Python and torch; without torch if its version is not public."""
    kernel: str = "ipykernel's"
    """The class of the kernel."""
    paths: dict[str, str] = field(default_factory=dict)
    """By path, why it did not hold; empty if it did."""

    @property
    def failed(self) -> bool:
        """Whether some path did not hold."""
        return not self.paths or any(self.paths.values())


def main() -> int:
    """Try the platforms and save what became of each; return 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platforms", nargs="*", help="names of files in tests/platforms, such as colab; default: all")
    parser.add_argument(
        "--own", action="store_true", help="the platform's Python and release of torch, where it is here"
    )
    parser.add_argument("--python", default=sys.executable, help="the interpreter for the environments")
    parser.add_argument(
        "--torch", default=_torch(), help="what pip installs as torch, such as torch==2.14.1; or a folder that has one"
    )
    parser.add_argument(
        "--classes", type=Path, metavar="FOLDER", help="a checkout of the platform's own kernel, for files that name it"
    )
    options = parser.parse_args()
    known = sorted(path.stem for path in PLATFORMS.glob("*.toml"))
    if unknown := set(options.platforms) - set(known):
        parser.error(f"no such platform: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    wheel, failed = build_wheel(), False
    for name in options.platforms or known:
        python, torch = _own(name, options.torch) if options.own else (options.python, options.torch)
        outcome = try_platform(name, wheel, python, torch, options.classes)
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(asdict(outcome), indent=1) + "\n")
        print("\n".join(f"{name}: {path}: {why or 'yes'}" for path, why in outcome.paths.items()))
        failed |= outcome.failed
    print("`python -m scripts.platform_table` writes the pages")
    return int(failed)


def _own(name: str, otherwise: str) -> tuple[str, str]:
    """The platform's interpreter, as far as PATH or pyenv has it, and its release of torch."""
    facts = tomllib.loads((PLATFORMS / f"{name}.toml").read_text(encoding="utf-8"))
    minor = ".".join(facts["python"].split(".")[:2])
    kept = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{minor}.*/bin/python"))
    folders = [*(str(path.parent) for path in kept), os.environ["PATH"]]
    python = shutil.which(f"python{minor}", path=os.pathsep.join(folders))
    if python is None:
        raise SystemExit(f"{facts['title']} has Python {minor}, which is not here: use --python")
    if Path(otherwise).is_dir() or "torch" not in facts:
        return python, otherwise
    return python, "torch==" + ".".join(re.findall(r"\d+", facts["torch"])[:3])


def _torch() -> str:
    return next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))


def build_wheel() -> Path:
    """The wheel of this checkout."""
    place = FOLDER / "wheel"
    for old in place.glob("*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "-w", place]
    subprocess.run([*command, ROOT], check=True)
    return next(place.glob("*.whl"))


def try_platform(name: str, wheel: Path, python: str, torch: str, classes: Path | None) -> Outcome:
    """Make the environment of a platform, install the wheel, and drive a kernel of it."""
    facts = tomllib.loads((PLATFORMS / f"{name}.toml").read_text(encoding="utf-8"))
    outcome = Outcome(facts["title"], own={key: facts[key] for key in ("python", "torch") if key in facts})
    print(f"== {name}", file=sys.stderr, flush=True)
    place = FOLDER / name
    found = place / "bin" / "python"
    subprocess.run([python, "-m", "venv", "--clear", place], check=True)
    pins = [f"{package}=={version}" for package, version in facts["pins"].items()]
    if Path(torch).is_dir():
        next(place.glob("lib/python*/site-packages")).joinpath("torch.pth").write_text(f"{Path(torch).resolve()}\n")
    else:
        pins.append(torch)
    if why := _install(found, *pins, *facts.get("packages", ())):
        outcome.paths["the platform's own packages"] = why
        return outcome
    before = _versions(found)
    outcome.versions = {"python": _python(found), **{name: before[name] for name in ("torch", "ipython", "ipykernel")}}
    outcome.paths[INSTALLATION] = _install(found, str(wheel), obeys=before if facts.get("constrained") else {})
    after = _versions(found)
    changed = {name: f"{name} {old} → {after.get(name)}" for name, old in before.items() if after.get(name) != old}
    outcome.paths[KEPT_TORCH] = _replaces_torch(outcome.own.get("torch", ""))
    if outcome.paths[KEPT_TORCH] and "torch" in changed:  # named, and not hidden among its libraries
        libraries = [changed.pop(name) for name in list(changed) if name not in facts["pins"]]
        outcome.paths[KEPT_TORCH] += f"; pip changes {', '.join(sorted(libraries, key=_is_library))}"
        outcome.versions["torch"] = after["torch"]
    if changed:
        outcome.paths[INSTALLATION] = f"changes {', '.join(changed.values())}"
    if not outcome.paths[INSTALLATION]:
        own = facts.get("classes", {}) if classes else {}
        if own and (why := _install(found, *own["packages"], obeys=after)):
            outcome.paths["the platform's own kernel"] = why
            return outcome
        outcome.kernel = own.get("kernel", outcome.kernel)
        outcome.paths |= _drive(found, place / "work", classes if own else None, own.get("options", ()))
    return outcome


def _is_library(change: str) -> bool:
    return not change.startswith("torch ")


def _replaces_torch(version: str) -> str:
    """Why pip would replace the platform's own torch, which is not the one that is installed here."""
    required = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    numbers = [
        [int(part) for part in re.findall(r"\d+", text)[:2]] for text in (version, required[1] if required else "")
    ]
    return f"{version} is below torch>={required[1]}" if version and required and numbers[0] < numbers[1] else ""


def _install(python: Path, *what: str, obeys: dict[str, str] | None = None) -> str:
    """Install; return pip's reason why not."""
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *what]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("".join(f"{package}=={version}\n" for package, version in (obeys or {}).items()))
        constraints.flush()
        command += ["--constraint", constraints.name] if obeys else []
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR:")]
    return (errors[0] if errors else "pip failed") if done.returncode else ""


def _versions(python: Path) -> dict[str, str]:
    command = [python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    listed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {entry["name"].lower(): entry["version"] for entry in listed}


def _python(python: Path) -> str:
    code = "import platform; print(platform.python_version())"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _drive(python: Path, work: Path, classes: Path | None, options: Sequence[str]) -> dict[str, str]:
    home = work.with_name("home")  # settings and caches of this user would be the environment's, too
    home.mkdir(exist_ok=True)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("JUPYTER", "IPYTHON", "PYTHON"))}
    env |= {"HOME": str(home), **({"PYTHONPATH": str(classes.resolve())} if classes else {})}
    command = [python, ROOT / "scripts" / "platform_paths.py", work, *options]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S, check=False)
    try:
        outcomes: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"a kernel": f"no result, exit status {done.returncode}"}
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
