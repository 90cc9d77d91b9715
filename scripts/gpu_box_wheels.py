"""Wheels that a machine with a GPU and without a network may lack: download them, and install what is missing.

Run this where there is a network, then take out/gpu_box/wheels along with the tree; `scripts/gpu_box.py` installs them.

    python scripts/gpu_box_wheels.py                 # for Python 3.12 on Linux, x86-64
    python scripts/gpu_box_wheels.py --python 3.13
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "scripts" / "gpu_box.txt"
WHEELS = ROOT / "out" / "gpu_box" / "wheels"
_PLATFORMS = ("2_39", "2_34", "2_28", "2_17", "2_12", "2_5")
"""Versions of glibc that wheels may be built for, newest first."""


def install_missing(wheels: Path, site: Path) -> None:
    """Install the pinned packages that this Python lacks, from wheels, into a folder.

    Raises:
        SystemExit: a wheel is missing.
    """
    pins = [line for line in PINS.read_text().splitlines() if not line.startswith("#")]
    there = {path.name for path in site.glob("*.dist-info")}
    missing = [pin for pin in pins if not _installed(pin.partition("==")[0])]
    missing = [pin for pin in missing if not any(name.startswith(_folder(pin)) for name in there)]
    if not missing:
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--find-links", str(wheels), "--target", str(site), *missing]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"Packages are missing: run `python scripts/gpu_box_wheels.py`, and bring {wheels} along.")


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _folder(pin: str) -> str:
    name, _, version = pin.partition("==")
    return f"{name.replace('-', '_')}-{version}."


def main(argv: list[str] | None = None) -> int:
    """Download what is pinned; return pip's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="the version of Python there")
    parser.add_argument("--out", type=Path, default=WHEELS, help="the folder for the wheels")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", options.python, "-r", str(PINS), "-d", str(options.out)]
    for version in _PLATFORMS:
        command += ["--platform", f"manylinux_{version}_x86_64"]
    code = subprocess.run(command, check=False).returncode
    wheels = list(options.out.glob("*.whl"))
    print(f"{len(wheels)} wheels, {sum(wheel.stat().st_size for wheel in wheels) / 1e6:.0f} MB, in {options.out}")
    return code


if __name__ == "__main__":
    sys.exit(main())
