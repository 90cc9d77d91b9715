"""Private hooks exist in the installed versions: the first tests to fail after an update."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch._C import _distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import axon_nb
from axon_nb.engine import bootstrap
from axon_nb.engine.self_test import catalog as self_test_hooks
from axon_nb.records import hooks
from axon_nb.torch_api import torch_api

ENGINE = Path(axon_nb.__file__).parent / "engine"


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
