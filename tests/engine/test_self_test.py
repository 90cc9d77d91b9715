"""The self-test of a rank, the hooks that it tries, and what the installed torch computes wrong without an error."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from torch import multiprocessing, nn
from torch._C import _distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import axon_nb
from axon_nb import wrong_numbers
from axon_nb.engine import bootstrap
from axon_nb.engine.self_test import catalog as self_test_hooks
from axon_nb.engine.self_test import runner, verdict
from axon_nb.engine.self_test.catalog import CHECKS, is_timeout, outcome
from axon_nb.records import hooks
from axon_nb.records.hooks import TESTED, Capability, install_command
from axon_nb.torch_api import torch_api
from axon_nb.wrong_numbers import Fault, faults, faults_of, note
from scripts import versions
from scripts import wrong_numbers as reproductions

pytestmark = pytest.mark.timeout(600)

COMMAND = [sys.executable, "-m", "axon_nb.engine.self_test", "--json"]
ATTEMPTS = 3
"""How often checks may time out: on a busy machine that says nothing of the versions."""
ONE_CHECK = """
import axon_nb.engine.self_test.catalog as catalog
catalog.CHECKS = catalog.CHECKS[-1:]
"""
"""For tests of everything around the checks."""

ENGINE = Path(axon_nb.__file__).parent / "engine"


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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the verdicts of this process, in which every check passes at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(runner, "run", lambda only: [outcome(check) for check in CHECKS])
    folder = verdict.cache_folder()
    folder.mkdir(parents=True)
    return folder


def test_old_failure_is_retested(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(only: Sequence[str]) -> list[Capability]:
        return [outcome(CHECKS[0], "AttributeError: gone"), *map(outcome, CHECKS[1:])]

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


@pytest.fixture(scope="module")
def walked() -> dict[str, Any]:
    """The register, checked in a process of its own: packages print messages, and change torch, when imported."""
    script = (
        "import json\nfrom axon_nb.engine.self_test.catalog import walk_hooks\n"
        "found = walk_hooks(with_optional=True)\nprint()\nprint(json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("group", hooks.groups())
def test_installed_versions_have_the_hook(group: str, walked: dict[str, Any]) -> None:
    if group in walked["unchecked"]:
        pytest.skip(f"{hooks.hook(group).package} is not installed")
    missing = {entry["group"]: entry["missing"] for entry in walked["missing"]}
    assert missing.get(group, []) == [], hooks.hook(group).lost
    assert group in walked["checked"] + walked["unused"]


def test_missing_hook_is_reported_with_lost_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    unused = next(name for name in hooks.groups() if not hooks.hook(name).is_used)
    monkeypatch.setattr(self_test_hooks, "groups", lambda: ["widgets.reopen", "groups.steps", unused])
    monkeypatch.setattr(self_test_hooks, "missing_hooks", lambda group: [f"{group} is gone"])
    found = self_test_hooks.walk_hooks()
    assert found["checked"] == ["widgets.reopen", "groups.steps"]
    assert found["unused"] == [unused]
    reopen, steps = found["missing"]
    assert reopen["lost"] == "`result.show()` shows nothing"
    assert reopen["fix"] == 'Run `pip install "ipywidgets==8.1.*"`.'
    assert (steps["missing"], steps["capability"]) == (["groups.steps is gone"], "optimizer_steps")
    assert steps["lost"] == "an interrupt can leave an optimizer's step half done"


def test_process_setup_functions_exist_where_replaced() -> None:
    assert {"init_process_group", "destroy_process_group"} <= set(vars(dist)) & set(vars(dist.distributed_c10d))
    assert callable(vars(multiprocessing)["spawn"])
    assert callable(bootstrap.install_dist_hooks)


HOMES: dict[str, tuple[Any, ...]] = {
    "torch.distributed.distributed_c10d": (dist.distributed_c10d,),
    "torch._C._distributed_c10d": (_distributed_c10d,),
    "ProcessGroup": (dist.ProcessGroup,),
    "ProcessGroupGloo": (_distributed_c10d.ProcessGroupGloo,),
    "Backend": (_distributed_c10d.Backend,),
    "Work": (_distributed_c10d.Work,),
    "sys": (sys,),
}
"""Where private names can live that are seen without running anything."""


def test_private_torch_modules_have_imported_names() -> None:
    absent = []
    for path, node in _nodes(ast.ImportFrom):
        if node.module and node.module.startswith("torch._"):
            module = __import__(node.module, fromlist=["_"])
            absent += [f"{path.name}: {node.module}.{a.name}" for a in node.names if not hasattr(module, a.name)]
    assert absent == []


def test_private_group_names_exist_on_their_classes() -> None:
    """Every private name called on `c10d`, a backend or an inner group exists on the class that it is called on."""
    receivers = {
        "c10d": HOMES["torch.distributed.distributed_c10d"],
        "_gloo": HOMES["torch._C._distributed_c10d"] + HOMES["ProcessGroupGloo"],
        "backend": HOMES["ProcessGroupGloo"] + HOMES["Backend"],
        "inner": HOMES["ProcessGroup"],
        "self._inner": HOMES["ProcessGroup"],
        "sys": HOMES["sys"],
    }
    absent = []
    for path, node in _nodes(ast.Attribute):
        homes = receivers.get(ast.unparse(node.value))
        private = node.attr.startswith("_") and not node.attr.startswith("__")
        if homes and private and not any(hasattr(home, node.attr) for home in homes):
            absent.append(f"{path.relative_to(ENGINE)}:{node.lineno}: {ast.unparse(node)}")
    assert absent == []


def test_every_group_operation_of_torch_is_wrapped() -> None:
    """A collective that torch has and we do not wrap would go around the recoverable group."""
    from axon_nb.engine.frames import group_operations

    collective = {
        name
        for name in dir(dist.ProcessGroup)
        if name.startswith(("all", "_all", "broadcast", "gather", "recv", "reduce", "_reduce", "scatter", "send"))
    }
    assert collective - set(group_operations()) == set()


@pytest.fixture
def one_rank_world() -> Any:
    """A default group of this process alone."""
    dist.init_process_group("gloo", store=_distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank_world")
def test_ddp_has_the_reset_and_rebuild_hooks() -> None:
    module = DistributedDataParallel(nn.Linear(2, 2))
    module(torch.ones(1, 2)).sum().backward()
    for name in ("_has_rebuilt_buckets", "_build_params_for_reducer", "_build_debug_param_to_name_mapping"):
        assert hasattr(module, name), name
    assert callable(module.reducer._reset_state)
    assert len(inspect.signature(module._ddp_init_helper).parameters) >= 4


@pytest.mark.usefixtures("one_rank_world")
def test_fsdp2_has_the_reset_hooks() -> None:
    from torch.distributed.fsdp import fully_shard

    module: Any = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    module(torch.ones(1, 2))  # a step that ends before its backward
    state = module._get_fsdp_state()
    assert state._is_root is True
    torch_api().reset_fsdp(module)
    module(torch.ones(1, 2)).sum().backward()
    (group,) = torch_api().fsdp_parameter_groups(state)
    assert hasattr(group, "_all_gather_result")
    for parameter in group.fsdp_params:
        assert hasattr(parameter, "_unsharded_param")
        assert parameter.sharded_param.grad is not None
        torch_api().drop_accumulated_gradient(parameter)


@pytest.mark.usefixtures("one_rank_world")
def test_pipelines_have_the_reset_hooks() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    stages = [PipelineStage(nn.Linear(2, 2), i, 2, torch.device("cpu")) for i in range(2)]
    single: Any = Schedule1F1B(PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu")), 2)
    several: Any = ScheduleInterleaved1F1B(stages, 2)
    assert single._stage_forward_initialized is single._stage_backward_initialized is False
    assert several._stages_forward_initialized is several._stages_backward_initialized is False
    for name in ("_internal_losses", "fwd_recv_ops", "bwd_recv_ops", "unshard_ops", "unsharded_stages"):
        assert hasattr(several, name), name
    for stage in [single._stage, *several._stages]:
        assert callable(stage.clear_runtime_states)
        for name in ("bwd_cache", "backward_state", "dw_runner"):
            assert hasattr(stage, name), name


def _nodes(kind: type[Any]) -> list[tuple[Path, Any]]:
    return [
        (path, node)
        for path in sorted(ENGINE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kind)
    ]


def test_list_agrees_with_the_installed_torch() -> None:
    listed = {one.name for one in faults_of(torch.__version__) if not one.gpus}
    found = {name for name, wrong in reproductions.reproduce().items() if wrong}
    assert found == listed, "run `make versions`, which updates axon_nb/wrong_numbers.toml"
    assert {one.name for one in faults() if not one.gpus} == set(reproductions.REPRODUCTIONS)


def test_entry_ends_with_the_first_version_that_is_right() -> None:
    fault = Fault("name", "what", "Do that.", "https://example.org", wrong=("2.12", "2.13"), right=("2.14",))
    assert [fault.is_in(version) for version in ("2.11.0", "2.13.2+cpu", "2.14.0", "2.16.0.dev1", "?")] == [
        *(True, True, False, False, False)
    ]


def test_run_of_a_version_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "list.toml"
    copy.write_text(wrong_numbers.DATA.read_text())
    for module in (wrong_numbers, reproductions):
        monkeypatch.setattr(module, "DATA", copy)
    monkeypatch.setattr(reproductions, "RELEASE", "2.99")
    reproductions.record({"max_of_nan": False, "bool_sum": True})
    after = {one.name: (one.wrong[-1], one.right[-1:]) for one in faults()}
    assert after["max_of_nan"] == (after["memory_layout"][0], ("2.99",))
    assert after["bool_sum"] == ("2.99", ())
    names = {one.name for one in faults_of("2.99.1")}
    assert "bool_sum" in names
    assert "max_of_nan" not in names


def test_page_has_the_list() -> None:
    assert versions.PAGE.read_text() == versions.page()


def test_start_counts_only_what_cells_can_meet() -> None:
    corrected = {one.name for one in faults() if one.is_corrected}
    assert corrected == {"bool_sum", "first_state_dict", "max_of_nan", "memory_layout"}
    assert corrected < {one.name for one in faults_of("2.15.0", "gloo")}
    assert note("2.15.0", "gloo").startswith("torch 2.15.0 computes 1 thing wrong")
