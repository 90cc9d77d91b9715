"""Run on a machine's GPUs what the project can show there, with the Python that is there and without a network.

    python scripts/gpu_box.py --out DIR --deadline 560 [--part N]

It needs torch with CUDA, and pytest. Other packages that are missing come from out/gpu_box/wheels, which
`scripts/gpu_box_wheels.py` fills where there is a network. axon_nb runs from this tree.

DIR/report.json is written after every test, so a kill loses nothing. The next call goes on where this one stopped: it
takes the report in DIR, or else the copy that each call leaves in out/gpu_box. `--part N` runs part N alone, again.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):  # run as a file
    sys.path[0] = str(ROOT)

from scripts.gpu_box_parts import DONE, PARTS, Item, Part  # noqa: E402 - needs the path above
from scripts.gpu_box_wheels import WHEELS, install_missing  # noqa: E402

FOLDER = ROOT / "out" / "gpu_box"
"""Wheels, the packages installed from them, logs, and a copy of the report."""
NO_GPU = "This machine has no GPU that torch can use: `--without-gpu` runs what needs none."
ONE_CARD = (
    "an abort of a collective that waits for a peer",
    "a connect that is cut short by an abort while the peer connects",
    "training on several NCCL ranks",
    "anything between two hosts",
)
"""What a machine with one GPU cannot show."""
_MARK = "AXON_NB_GPU_BOX"
_POLL_S = 0.2
_LEAST_S = 15.0
"""With less time left no process is started."""
_FACTS = """
import json, torch
from importlib import metadata
cuda = torch.cuda.is_available()
cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count() if cuda else 0)]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
names = ("nvidia-ml-py", "cupy-cuda13x", "ipyparallel", "ipykernel")
print(json.dumps({
    "gpus": [{"name": card.name, "total_bytes": card.total_memory} for card in cards],
    "versions": {
        "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl, **{name: version(name) for name in names}
    },
}))
"""


class Box:
    """One call: runs items until the deadline and keeps the report.

    Args:
        out: The folder for the report.
        deadline_s: Seconds from now after which nothing runs any more.
        folder: The folder for the copy of the report and for logs.
    """

    def __init__(self, out: Path, deadline_s: float, folder: Path = FOLDER) -> None:
        self._end = time.monotonic() + deadline_s
        self._files = [out / "report.json", folder / "report.json"]
        self._logs = folder / "logs"
        for path in (out, self._logs):
            path.mkdir(parents=True, exist_ok=True)
        earlier = next((path for path in self._files if path.exists()), None)
        self.report: dict[str, Any] = json.loads(earlier.read_text(encoding="utf-8")) if earlier else {"parts": {}}
        """What all calls found."""
        self._env = {**os.environ, _MARK: uuid.uuid4().hex, "PYTHONUNBUFFERED": "1"}
        self._env["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), str(folder / "site"), os.environ.get("PYTHONPATH")])
        )

    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return self._end - time.monotonic()

    def save(self) -> None:
        """Write the report."""
        text = json.dumps(self.report, indent=1).replace(str(ROOT), ".").replace(sys.prefix, "python") + "\n"
        for path in self._files:
            part = path.with_suffix(".part")
            part.write_text(text, encoding="utf-8")
            part.replace(path)

    def run_part(self, part: Part, *, gpus: int) -> bool:
        """Run the items of a part that have no result yet; return False if the time did not suffice for all."""
        found = self.report["parts"].setdefault(part.name, {})
        for item in part.items:
            if found.get(item.name, {}).get("outcome", "not run") != "not run":
                continue
            if gpus < item.gpus:
                found[item.name] = {"outcome": "not run", "why": f"needs {item.gpus} GPU{'s' * (item.gpus > 1)}"}
                continue
            if self.left_s() < _LEAST_S:
                return False
            print(f"== {part.name}: {item.name}", flush=True)
            self._run_item(item, found.setdefault(item.name, {}))
            if not found[item.name].get("outcome"):
                return False
        self.save()
        return True

    def _run_item(self, item: Item, result: dict[str, Any]) -> None:
        """Run one item; without an outcome if the deadline ended it."""
        log = self._logs / f"{item.name.replace('/', '-')[:80]}.log"
        # A test in which an earlier call was killed has a start and no end.
        tests: dict[str, Any] = result.setdefault("tests", {})
        for test in tests.values():
            test.setdefault("outcome", "failed: the deadline or a kill ended it")
        env = self._env | item.env | {DONE: json.dumps(list(tests))}
        began, limit_s = time.monotonic(), min(item.limit_s, self.left_s())
        with log.open("w+b") as output:
            process = subprocess.Popen(
                [sys.executable, *item.arguments],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                read = 0
                while process.poll() is None and time.monotonic() - began < limit_s:
                    time.sleep(_POLL_S)
                    read = self._collect(log, read, result)
                code = process.poll()
            finally:
                _kill_group(process.pid)
                process.wait()
                self._kill_left()
        self._collect(log, read, result)
        result["seconds"] = round(result.get("seconds", 0) + time.monotonic() - began, 1)
        if code is None and limit_s < item.limit_s and not result.get("cut"):
            result["cut"] = True  # by the deadline; the next call goes on, once
            result["tests"] = {name: test for name, test in tests.items() if "outcome" in test}
        else:
            result["outcome"], why = _outcome(code, item, tests)
            result |= {"why": why, "tail": _tail(log)} if why else {}
        self.save()

    def _collect(self, log: Path, start: int, result: dict[str, Any]) -> int:
        """Add the complete lines after `start` bytes to the result; return where they end."""
        with log.open("rb") as file:
            file.seek(start)
            new = file.read()
        end = new.rfind(b"\n") + 1
        changed = False
        for line in new[:end].splitlines():
            if not (line.startswith(b"{") and line.endswith(b"}")):
                continue
            try:
                values = json.loads(line)
            except ValueError:
                continue
            name = values.pop("test", None)
            target = result.setdefault("figures", {}) if name is None else result["tests"].setdefault(name, {})
            target.update(values)
            changed = True
        if changed:
            self.save()
        return start + end

    def _kill_left(self) -> None:
        """Kill what the item left running in sessions of its own, such as ranks."""
        mark = f"{_MARK}={self._env[_MARK]}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:  # it has ended, or belongs to another user
                continue

    def ask(self, code: str) -> dict[str, Any]:
        """Return the JSON object that some code prints, in a process of its own."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], env=self._env, capture_output=True, timeout=120, check=True
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))


def _outcome(code: int | None, item: Item, tests: dict[str, Any]) -> tuple[str, str]:
    if code is None:
        return "failed", f"did not end within {item.limit_s:g} s"
    if any(str(test.get("outcome")).startswith("failed") for test in tests.values()):
        return "failed", "tests failed"
    nothing_left = 5  # pytest: all tests are deselected
    if code and not (code == nothing_left and tests):
        return "failed", f"exit status {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    return "passed", ""


def _tail(log: Path) -> str:
    return log.read_bytes()[-3000:].decode(errors="replace")


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is left to run; return 1 without a GPU, 2 if something failed, 3 if something is left, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder for report.json")
    parser.add_argument("--deadline", type=float, default=86400.0, metavar="S", help="stop after this many seconds")
    parser.add_argument("--part", type=int, metavar="N", help=f"run part N alone, 1 to {len(PARTS)}, again")
    parser.add_argument("--without-gpu", action="store_true", help="run what needs no GPU if there is none")
    options = parser.parse_args(argv)
    box = Box(options.out, options.deadline)
    install_missing(WHEELS, FOLDER / "site")
    facts = box.ask(_FACTS)
    if not facts["gpus"] and not options.without_gpu:
        print(NO_GPU, file=sys.stderr)
        return 1
    if box.report.get("gpus", facts["gpus"]) != facts["gpus"]:
        box.report["parts"] = {}  # of another machine
    _describe(box.report, facts)
    box.save()
    asked = list(PARTS) if options.part is None else [PARTS[options.part - 1]]
    if options.part is not None:
        box.report["parts"].pop(asked[0].name, None)
    complete = all(box.run_part(part, gpus=len(facts["gpus"])) for part in asked)
    failed = [
        name for part in box.report["parts"].values() for name, one in part.items() if one.get("outcome") == "failed"
    ]
    print(f"{options.out / 'report.json'}: {', '.join(failed) + ' failed' if failed else 'nothing failed'}")
    if not complete:
        print("The time did not suffice: call it again to go on.")
    return 2 if failed else 0 if complete else 3


def _describe(report: dict[str, Any], facts: dict[str, Any]) -> None:
    report |= {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()},
        "gpus": facts["gpus"],
        "versions": facts["versions"],
        "not shown": list(ONE_CARD) if len(facts["gpus"]) < 2 else [ONE_CARD[-1]],
    }


if __name__ == "__main__":
    sys.exit(main())
