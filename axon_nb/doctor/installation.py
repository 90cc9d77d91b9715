"""The installation: versions, build options of torch, whether recovery works, private hooks that are missing here.

Checks that may crash or hang run in child processes: each has a time limit, and failures have a reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from packaging.requirements import InvalidRequirement, Requirement

from axon_nb._version import __version__
from axon_nb.doctor.report import Finding, Section
from axon_nb.records.hooks import are_tested, hook, install_command
from axon_nb.records.units import format_seconds
from axon_nb.wrong_numbers import faults_of

SELF_TEST = ("-m", "axon_nb.engine.self_test", "--json", "--hooks")
"""Arguments of Python for the engine's self-test and its walk through the register of private hooks."""
TORCH_BUILD = (
    "-c",
    """
import json, torch, torch.distributed as dist
there = dist.is_available()
nccl = there and dist.is_nccl_available()
print(json.dumps({
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "hip": torch.version.hip,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
    "backends": [name for name in ("gloo", "nccl", "mpi") if there and getattr(dist, f"is_{name}_available")()],
    "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
}))
""",
)
"""Python arguments that print torch's build options; in a child process, as this one never imports torch."""
_PACKAGES = ("ipyparallel", "ipykernel", "ipython", "ipywidgets", "jupyterlab", "notebook", "numpy", "pyzmq", "psutil")
_ENVIRONMENT = re.compile(r"(AXON_NB|CUDA|GLOO|NCCL|OMP|MKL|NVIDIA_VISIBLE|PYTORCH|TORCH|TP_SOCKET)[A-Z0-9_]*")
_HOOKS_TITLE = "private hooks"


class Answer(Struct, frozen=True):
    """Result of a child process."""

    content: dict[str, Any] = field(default_factory=dict)
    """The JSON object that it printed; empty if it printed none."""
    failure: str = ""
    """Why there is no content; empty otherwise."""
    stderr: str = ""


class Child:
    """A Python process that prints one JSON object; starts at once, `answer` waits for it."""

    def __init__(self, arguments: Sequence[str], *, timeout_s: float) -> None:
        """Start the process.

        Args:
            arguments: Arguments of this Python interpreter.
            timeout_s: Time limit in seconds, from now.
        """
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        # Files, not pipes: a leftover grandchild could keep a pipe open.
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        parent = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), parent]))
        self._process = subprocess.Popen(
            [sys.executable, "-P", *arguments],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    def answer(self) -> Answer:
        """Wait for the output, or the reason why there is none; kill the process at the time limit."""
        try:
            code: int | None = self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        out, err = _output_text(self._out), _output_text(self._err)
        self.close()
        last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "").removeprefix(
            f"{sys.executable}: "
        )
        if code is None:
            how = f"timed out after {self._timeout_s:g} s"
            return Answer(failure=f"{last} ({how})" if last else how, stderr=err)
        content = _last_object(out)
        if content:
            return Answer(content, stderr=err)
        how = f"killed by {_signal(-code)}" if code < 0 else f"exit code {code}" if code else "its output is not JSON"
        return Answer(failure=f"{last} ({how})" if last else how, stderr=err)

    def close(self) -> None:
        """Kill it and everything it started in its own session."""
        if not self._out.closed:
            if self._process.poll() is None:
                with contextlib.suppress(OSError):  # it leads its process group and has not been reaped
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._out.close()
            self._err.close()


def _output_text(file: Any) -> str:
    file.seek(0)
    return bytes(file.read()).decode(errors="replace")


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_object(text: str) -> dict[str, Any]:
    """Find the JSON object on standard output; libraries may have printed other lines before it."""
    for candidate in [text, *reversed(text.splitlines())]:
        with contextlib.suppress(ValueError):
            value = json.loads(candidate)
            if isinstance(value, dict):
                return value
    return {}


def software(build: Answer) -> Section:
    """Report installed versions.

    Args:
        build: Result of the child `TORCH_BUILD`.
    """
    findings = [
        Finding("axon_nb", __version__),
        Finding("Python", f"{platform.python_version()} {platform.python_implementation()}, {_home(sys.executable)}"),
        Finding("system", _system()),
        _torch(build),
        Finding("packages", ", ".join(f"{name} {version}" for name in _PACKAGES if (version := _version(name)))),
        *_unmet(),
    ]
    packages = {name: _version(name) for name in ("torch", *_PACKAGES)}
    data = {"axon_nb": __version__, "python": platform.python_version(), "packages": packages, "build": build.content}
    return Section("software", tuple(findings), data)


def _torch(build: Answer) -> Finding:
    facts = build.content
    if facts:
        made = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "CPU only"
        nccl = f"NCCL {facts['nccl']}" if facts["nccl"] else "no NCCL"
        value = f"{facts['torch']} ({made}, {nccl}; backends {', '.join(facts['backends']) or 'none'})"
        if "gloo" not in facts["backends"]:
            return Finding(
                "torch", value, "problem", "Ranks need Gloo, which this torch build lacks.",
                f"Install another build of torch: `{pip()} install --force-reinstall torch`.",
            )  # fmt: skip
        if are_tested({"torch": str(facts["torch"])}):
            return Finding("torch", value)
        return Finding(
            "torch", value, "note", "This axon_nb was not tested with it: what the self-test cannot confirm is off.",
            f"If something is missing, run `{install_command('torch')}`.",
        )  # fmt: skip
    if _version("torch") is None:
        return Finding(
            "torch", "missing", "problem", "Ranks cannot start without it.", f'Run `{pip()} install "torch>=2.8"`.'
        )
    return Finding(
        "torch", f"{_version('torch')}, cannot be imported: {build.failure}", "problem", "Ranks cannot start.",
        f'See the full error with `{_python()} -c "import torch"`; reinstalling torch usually helps.',
    )  # fmt: skip


def _unmet() -> list[Finding]:
    """Requirements of axon_nb that are not met; torch has its own finding."""
    try:
        wanted = metadata.requires("axon_nb") or []
    except metadata.PackageNotFoundError:
        return []
    findings = []
    for text in wanted:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            if requirement.name == "torch" and version is None:
                continue
            message = f"axon_nb needs {requirement.name} {requirement.specifier}."
            fix = f'Run `{pip()} install "{requirement.name}{requirement.specifier}"`.'
            findings.append(Finding(requirement.name, version or "missing", "problem", message, fix))
    return findings


def self_test(answer: Answer) -> Section:
    """Report which of the features that recovery needs work with this torch.

    Args:
        answer: Result of the child `SELF_TEST`.
    """
    name, facts = "self-test", answer.content
    if _version("torch") is None:
        return Section(name, (Finding(name, "did not run: torch is missing"),))
    capabilities = facts.get("capabilities")
    if not isinstance(capabilities, list):
        why = answer.failure or "its reply lists no capabilities"
        return Section(name, (_not_run(why),), {"failure": why})
    findings = tuple(_capability(entry) for entry in capabilities if isinstance(entry, dict))
    title = f"{name} of torch {facts.get('torch', '?')}"
    seconds = facts.get("seconds")
    if isinstance(seconds, int | float):
        title += f" ({format_seconds(seconds)})"
    return Section(title, findings, facts)


def wrong_numbers(build: Answer) -> Section:
    """Report what the installed torch computes wrong without an error.

    Args:
        build: Result of the child `TORCH_BUILD`.
    """
    found = [one for one in faults_of(_version("torch") or "") if build.content.get("gpus") or not one.gpus]
    findings = tuple(Finding(one.name, f"{one} ({one.source})") for one in found)
    data = {"faults": [dataclasses.asdict(one) for one in found]}
    return Section("wrong without an error", findings or (Finding("torch", "nothing known"),), data)


def _not_run(why: str) -> Finding:
    if "No module named axon_nb.engine.self_test" in why:
        fix = "Reinstall axon_nb: this installation lacks `axon_nb/engine/self_test`."
    else:
        fix = f"Run `{_python()} -m axon_nb.engine.self_test` to see why."
    return Finding("self-test", f"did not run: {why}", "problem", "It is unknown whether ranks can recover here.", fix)


def _capability(entry: dict[str, Any]) -> Finding:
    label = str(entry.get("label") or entry.get("name"))
    if entry.get("works"):
        return Finding(label, "works")
    reason, lost = str(entry.get("reason") or "no reason given"), str(entry.get("lost") or "")
    fix = str(entry.get("fix") or "")
    fix = f"Run `{fix}`." if fix.startswith("pip ") else fix or "Use a version of torch that axon_nb was tested with."
    return Finding(label, f"does not work ({reason})", "problem", f"Lost: {lost}." if lost else "", fix)


def environment() -> Section:
    """List environment variables that affect how ranks compute and communicate."""
    variables = {name: value for name, value in sorted(os.environ.items()) if _ENVIRONMENT.fullmatch(name)}
    return Section(
        "environment", tuple(Finding(name, value or "(empty)") for name, value in variables.items()), variables
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _system() -> str:
    name = f"{platform.system()} {platform.release()} {platform.machine()}"
    libc = " ".join(platform.libc_ver()).strip()
    return f"{name}, {libc}" if libc else name


def _home(path: str) -> str:
    home = os.path.expanduser("~")
    return f"~{path.removeprefix(home)}" if home != "/" and path.startswith(f"{home}/") else path


def _python() -> str:
    return _home(sys.executable)


def pip() -> str:
    """The command line of this Python's pip."""
    return f"{_python()} -m pip"


def private_hooks(answer: Answer) -> Section:
    """Report hooks that the installed versions lack.

    Those that a check of the self-test tries are not counted as problems again: its verdict decides whether anything is
    lost.

    Args:
        answer: Result of the child `versions.SELF_TEST`, which walks the register after the self-test.
    """
    facts = answer.content.get("hooks")
    if not isinstance(facts, dict) or "missing" not in facts:
        why = facts.get("failure", "") if isinstance(facts, dict) else answer.failure
        return Section(_HOOKS_TITLE, (Finding("all", f"not checked: {why or 'the self-test did not list them'}"),), {})
    missing = [_missing_hook(entry) for entry in facts["missing"]]
    packages = Counter(hook(group).package for group in facts["checked"])
    lacking = {entry["group"] for entry in facts["missing"]}
    there = f"{len(facts['checked']) - len(lacking)} of {len(facts['checked'])} found"
    listed = ", ".join(f"{package} {count}" for package, count in packages.items())
    findings = [*missing, Finding("found" if missing else "all", f"{there} ({listed})")]
    if facts["unchecked"]:
        unloaded = ", ".join(dict.fromkeys(hook(group).package for group in facts["unchecked"]))
        value = f"{len(facts['unchecked'])}, in packages that only cells load: {unloaded}"
        findings.append(Finding("unchecked", value))
    return Section(_HOOKS_TITLE, tuple(findings), facts)


def _missing_hook(entry: dict[str, Any]) -> Finding:
    label, value = str(entry["group"]), f"{entry['package']} lacks {', '.join(entry['missing'])}"
    if entry["capability"]:
        return Finding(label, f"{value}; the self-test tries it ({entry['capability']})")
    return Finding(label, value, "problem", f"Lost: {entry['lost']}.", str(entry["fix"]))
