"""Run on this machine's GPUs what the project can show there, and write one JSON file: `make gpu-report`.

It runs `tests/gpu` with connections that block and that do not, the drills (each way to end each kind of hang),
`benchmarks/gpu.py`, and memory plans against CUDA's allocator. `python -m scripts.gpu_status` then puts the file's
result into README.md and docs/gpu.md. Without a GPU it says why and returns 1.

    python -m scripts.gpu_report --out FILE
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from axon_nb.doctor.children import Child
from axon_nb.doctor.gpus import NVML
from axon_nb.doctor.versions import TORCH_BUILD

__all__ = ["ONE_CARD", "REPORTS", "absence", "main", "read_results"]

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "docs" / "gpu_reports"
ONE_CARD = (
    "an abort of a collective that waits for a peer",
    "a connect that is cut short by an abort while the peer connects",
    "training on several NCCL ranks",
    "anything between two hosts",
)
"""What a machine with one GPU cannot show."""
_PACKAGES = ("axon_nb", "torch", "nvidia-ml-py", "cupy-cuda13x", "ipyparallel")
_TESTS_LIMIT_S = 3600.0
_PART_LIMIT_S = 1800.0


def absence(build: dict[str, Any], nvml: dict[str, Any]) -> str:
    """Return one sentence that says why there is nothing to report; empty if torch can use a GPU.

    Args:
        build: What torch's build can do; the output of the doctor's child.
        nvml: What the driver reports.
    """
    if build.get("gpus"):
        return ""
    if not build.get("torch"):
        return "No GPU report: torch cannot be imported; `axon-nb doctor` says why."
    if not nvml.get("gpus"):
        return "No GPU report: this machine has no NVIDIA GPU."
    if not build.get("cuda"):
        return f"No GPU report: torch {build['torch']} is built without CUDA; install a build for CUDA."
    return "No GPU report: torch cannot use the GPUs of this machine; `axon-nb doctor` says why."


def main(argv: list[str] | None = None) -> int:
    """Write the report; return 1 without a GPU, 2 if something failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the file; by default one in docs/gpu_reports, named by date and GPU")
    options = parser.parse_args(argv)
    children = Child(NVML, timeout_s=60.0), Child(TORCH_BUILD, timeout_s=300.0)
    nvml, build = (child.answer().content for child in children)
    if reason := absence(build, nvml):
        print(reason, file=sys.stderr)
        return 1
    report = _machine(nvml, build)
    out = options.out or REPORTS / f"{report['date']}-{_slug(report['gpus'][0]['name'])}-x{build['gpus']}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    parts = {
        "tests": lambda: _tests(nonblocking=True),
        "tests, blocking connections": lambda: _tests(nonblocking=False),
        "drill": lambda: _part("tests.gpu.drill"),
        "figures": lambda: _part("benchmarks.gpu"),
    }
    for name, run in parts.items():
        print(f"== {name}", flush=True)
        report[name] = run()
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")  # kept even if a later part hangs
    failed = [name for name in parts if report[name].get("failed")]
    print(f"{out}: {', '.join(failed) + ' failed' if failed else 'everything passed'}")
    return 2 if failed else 0


def _machine(nvml: dict[str, Any], build: dict[str, Any]) -> dict[str, Any]:
    cards = nvml.get("gpus") or [{"name": "GPU"}]
    versions = {name: _version(name) for name in _PACKAGES}
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()},
        "gpus": [{key: card.get(key) for key in ("name", "total_bytes", "mig")} for card in cards],
        "driver": nvml.get("driver"),
        "versions": {**versions, "cuda": build.get("cuda"), "nccl": build.get("nccl")},
        "not shown": list(ONE_CARD) if build["gpus"] == 1 else [ONE_CARD[-1]],
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _tests(*, nonblocking: bool) -> dict[str, Any]:
    env = {**os.environ, "TORCH_NCCL_USE_COMM_NONBLOCKING": str(int(nonblocking))}
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}", "tests/gpu"]
        end = _run(command, _TESTS_LIMIT_S, env)
        return (read_results(junit) if junit.exists() else {"failed": {"pytest": "wrote no results"}}) | end


def read_results(junit: Path) -> dict[str, Any]:
    """Read a file of pytest's ``--junitxml``: names of passed tests, failures and skips with their reasons, figures.

    Figures are what tests recorded with `record_property`.
    """
    found: dict[str, Any] = {"passed": [], "failed": {}, "skipped": {}, "figures": {}}
    for case in ET.parse(junit).iter("testcase"):
        name = f"{(case.get('classname') or '').rpartition('.')[2]}::{case.get('name')}"
        bad = next((one for one in case if one.tag in ("failure", "error")), None)
        skip = case.find("skipped")
        if bad is not None:
            found["failed"][name] = (bad.get("message") or "").partition("\n")[0][:300]
        elif skip is not None:
            found["skipped"][name] = skip.get("message") or ""
        else:
            found["passed"].append(name)
        if properties := {one.get("name"): one.get("value") for one in case.iter("property")}:
            found["figures"][name] = properties
    return found


def _part(module: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        end = _run([sys.executable, "-m", module, "--out", str(out)], _PART_LIMIT_S, dict(os.environ))
        return (json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}) | end


def _run(command: list[str], limit_s: float, env: dict[str, str]) -> dict[str, Any]:
    """Run one part; its failure, if it could not even report its own."""
    try:
        code = subprocess.run(command, cwd=ROOT, env=env, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        return {"failed": {command[2]: f"did not end within {limit_s:g} s"}}
    return {} if code in (0, 1) else {"failed": {command[2]: f"exit status {code}"}}


if __name__ == "__main__":
    sys.exit(main())
