"""The self-test: everything works on this torch, a missing hook is named, and the verdict is cached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from axon_nb.engine.self_test import runner, verdict
from axon_nb.engine.self_test.catalog import CHECKS, failed, is_timeout, passed
from axon_nb.records.hooks import TESTED, Capability, install_command

pytestmark = pytest.mark.timeout(600)

COMMAND = [sys.executable, "-m", "axon_nb.engine.self_test", "--json"]
ATTEMPTS = 3
"""How often checks may time out: on a busy machine that says nothing of the versions."""
ONE_CHECK = """
import axon_nb.engine.self_test.catalog as catalog
catalog.CHECKS = catalog.CHECKS[-1:]
"""
"""For tests of everything around the checks."""


def _environment(folder: Path, site: str = "") -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(site)
    path = os.pathsep.join([str(folder), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / "cache")}


def _run(folder: Path, site: str = "", *, only: Sequence[str] = (), **variables: str) -> dict[str, Any]:
    """What the self-test finds; it runs again while a check times out, at most `ATTEMPTS` times in all."""
    command = [*COMMAND, "--only", *only] if only else COMMAND
    for _ in range(ATTEMPTS):
        environment = {**_environment(folder, site), **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        found: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == int(any(not capability["works"] for capability in found["capabilities"]))
        if not any(is_timeout(capability["reason"]) for capability in found["capabilities"]):
            break
        command = [*command, "--fresh"]
    return found


def _lost(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [capability for capability in found["capabilities"] if not capability["works"]]


def _saved(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "axon_nb" / "self_test").glob("*.json"))


def test_installed_versions_pass_and_are_tested_once(tmp_path: Path) -> None:
    found = _run(tmp_path)
    assert _lost(found) == []
    assert [capability["name"] for capability in found["capabilities"]] == [check.name for check in CHECKS]
    (saved,) = _saved(tmp_path)
    written = saved.stat().st_mtime_ns
    assert _run(tmp_path) == found
    assert saved.stat().st_mtime_ns == written


STAGE_FAILS = """
from torch.distributed.pipelining.stage import _PipelineStageBase
original = _PipelineStageBase.clear_runtime_states


def clear_runtime_states(self):  # as torch's schedules call it, but not as our reset does
    import sys

    if "axon_nb" in sys._getframe(1).f_code.co_filename:
        raise AttributeError("clear_runtime_states")
    original(self)


_PipelineStageBase.clear_runtime_states = clear_runtime_states
"""
MOCK_CRASHES = """
import os
import axon_nb.comm.mock_world as mock_world
mock_world.MockWorld.run = lambda *_: os.kill(os.getpid(), 11)
"""
BROKEN = {
    "no table of guarded lines": ("import dis\ndel dis._parse_exception_table\n", "interrupts"),
    "no reset of a pipeline's stage": (STAGE_FAILS, "pipeline_reset"),
    "a crash where mock worlds are made": (MOCK_CRASHES, "mock_worlds"),
}
NEIGHBORS = {
    "interrupts": ["optimizer_steps", "interrupts", "kernel_hooks"],
    "pipeline_reset": ["fsdp2_reset", "pipeline_reset", "pipeline_spans"],
    "mock_worlds": ["mock_worlds", "simulation"],
}
"""What uses something similar and works nevertheless."""


def _assert_only_lost(lost: list[dict[str, Any]], expected: str) -> None:
    assert [capability["name"] for capability in lost] == [expected], lost
    for capability in lost:
        assert capability["reason"]
        assert capability["lost"]
        assert capability["fix"] == install_command("torch")


@pytest.mark.parametrize("what", BROKEN)
def test_lost_capability_is_reported_with_fix(tmp_path: Path, what: str) -> None:
    site, expected = BROKEN[what]
    found = _run(tmp_path, site, only=NEIGHBORS[expected])
    assert [capability["name"] for capability in found["capabilities"]] == NEIGHBORS[expected]
    _assert_only_lost(_lost(found), expected)
    assert _saved(tmp_path) == [], "a verdict needs all checks"


@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
def test_other_capabilities_keep_working(tmp_path: Path, what: str) -> None:
    site, expected = BROKEN[what]
    _assert_only_lost(_lost(_run(tmp_path, site)), expected)
    (saved,) = _saved(tmp_path)
    os.utime(saved, (0, 0))
    assert _lost(_run(tmp_path)) == []


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the verdicts of this process, in which every check passes at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(runner, "run", lambda only: [passed(check) for check in CHECKS])
    folder = verdict.cache_folder()
    folder.mkdir(parents=True)
    return folder


def test_old_failure_is_retested(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(only: Sequence[str]) -> list[Capability]:
        return [failed(CHECKS[0], "AttributeError: gone"), *map(passed, CHECKS[1:])]

    with monkeypatch.context() as broken:
        broken.setattr(runner, "run", fail)
        assert [capability.name for capability in verdict.current_verdict(in_process=True).lost] == [CHECKS[0].name]
    assert verdict.current_verdict(in_process=True).lost, "of this start"
    (saved,) = _saved(tmp_path)
    os.utime(saved, (0, 0))
    assert not verdict.current_verdict(in_process=True).lost
    assert _saved(tmp_path) == [saved]
    assert saved.parent == cache


def test_folders_of_killed_self_tests_are_removed(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in (f"axon_nb-self-test-{gone.pid}-x", f"axon_nb-self-test-{os.getpid()}-y", "other"):
        (temporary / name).mkdir(parents=True)
        os.utime(temporary / name, (0, 0))
    assert _lost(_run(tmp_path, only=["simulation"], TMPDIR=str(temporary))) == []
    left = {path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor")}
    assert left == {f"axon_nb-self-test-{os.getpid()}-y", "other"}


def test_verdict_of_another_build_is_replaced(cache: Path) -> None:
    before = verdict.current_verdict(in_process=True)
    path = cache / "verdict.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "build": "another"}))
    assert verdict.cached_verdict() is None
    verdict.current_verdict(in_process=True)
    assert verdict.cached_verdict() is not None
    assert json.loads(path.read_text())["build"] == content["build"]
    assert {path.name for path in cache.iterdir()} == {"verdict.json", "lock"}
    assert before.torch == json.loads(path.read_text())["verdict"]["torch"]


def test_concurrent_processes_share_one_self_test(tmp_path: Path) -> None:
    environment = _environment(tmp_path, ONE_CHECK)
    processes = [
        subprocess.Popen(COMMAND, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(2)
    ]
    try:
        answers = [json.loads(process.communicate(timeout=200)[0]) for process in processes]
    finally:
        for process in processes:  # those that still run would slow down the tests that follow
            with process:
                process.kill()
    assert answers[0] == answers[1]  # the seconds it took, too
    assert len(_saved(tmp_path)) == 1


@pytest.mark.parametrize(
    ("reason", "late"),
    [
        ("timed out after 30 s on rank 0", True),
        ("TimeoutError: rank 0 wrote no note 'groups' within 20 s", True),
        ("RuntimeError: [gloo/unbound_buffer.cc:81] Timed out waiting 20000ms for recv operation to complete", True),
        ("DistStoreError: wait timeout after 20000ms, keys: /epoch1/0/1", True),
        ("RuntimeError: Gloo connectFullMesh failed with Connection closed by peer", False),
        ("AttributeError: missing: dis._parse_exception_table", False),
    ],
)
def test_timed_out_check_gives_no_verdict(reason: str, late: bool) -> None:
    assert is_timeout(reason) is late


def test_unwritable_cache_folder_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, where a folder should be")
    found = _run(tmp_path, ONE_CHECK)
    assert [capability["name"] for capability in found["capabilities"]] == [CHECKS[-1].name]
    assert _lost(found) == []


def test_declared_minimum_versions_are_the_tested_ones() -> None:
    declared = {}
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for line in tomllib.loads(text)["project"]["dependencies"]:
        requirement = Requirement(line)
        declared[requirement.name] = {spec.operator: spec.version for spec in requirement.specifier}
    for package, (lowest, _) in TESTED.items():
        assert declared[package][">="] == lowest
