"""Where parameters, gradients and optimizer states are on a GPU, for each kind of offloading, and what that frees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.script import Script

pytestmark = pytest.mark.gpu

SETUP = """
import gc
from torch import nn
from axon_nb.parallel import FSDP, CPUOffload, ShardingStrategy
from axon_nb.parallel.memory import optimizer_states

def places(tensors):
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sorted({t.device.type + (" pinned" if t.is_pinned() else "") for t in local})

def four(stats):
    return stats.param_memory_bytes, stats.grad_memory_bytes, stats.optim_memory_bytes, stats.host_bytes

def train(strategy, offload):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(1025, 1025) for _ in range(4))).to(device)
    model = FSDP(net, strategy=ShardingStrategy[strategy], cpu_offload=CPUOffload[offload])
    del net
    optimizer = model.optimizer(torch.optim.Adam, lr=1e-3)
    x = torch.randn(8, 1025, device=device, generator=torch.Generator(device).manual_seed(rank))
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        model.clip_grad_norm(1.0)
        optimizer.step()
        gc.collect()  # garbage holds DDP's first buckets, and the next backward lets go of them
    torch.cuda.synchronize()
    grads = [p.grad for p in model.parameters()]
    found = {
        "params": places(model.parameters()), "grads": places(grads), "states": places(optimizer_states(optimizer)),
        "held": four(model.memory_stats()), "estimate": four(model.memory_estimate()),
        "allocated": torch.cuda.memory_allocated(),
        "weights": [value.double().sum().item() for value in model.full_state_dict().values()],
    }
    del model, optimizer, grads
    gc.collect()
    return found
"""

PLACES = {
    "NONE": ("cuda", "cuda", "cuda"),
    "PARAMS": ("cpu pinned", "cuda", "cuda"),
    "OPTIMIZER_STATES": ("cuda", "cuda", "cpu pinned"),
    "FULL": ("cpu pinned", "cpu pinned", "cpu"),
}
STRATEGIES = {
    "FULL_SHARD": list(PLACES),
    "SHARD_GRAD_OP": list(PLACES),
    "NO_SHARD": list(PLACES),
    "OPTIMIZER_STATE": ["NONE", "OPTIMIZER_STATES"],
}


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script with one rank on NCCL."""
    with Script(tmp_path_factory.mktemp("offload")) as script:
        script.ok("import axon_nb\nc = axon_nb.start(1, backend='nccl')", timeout=120)
        script.ok(f"c.run({SETUP!r})", timeout=120)
        # Libraries take memory of their own in the first step.
        script.ok('c.run(\'train("FULL_SHARD", "NONE"); idle = torch.cuda.memory_allocated()\')', timeout=120)
        yield script


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_offloaded_state_is_on_the_host_and_frees_gpu_memory(nccl: Script, strategy: str) -> None:
    idle = nccl.value("c.run('idle')[0]")
    found: dict[str, Any] = {}
    for offload in STRATEGIES[strategy]:
        cell = f"train({strategy!r}, {offload!r})"
        found[offload] = nccl.value(f"c.run({cell!r})[0]")
    for offload, facts in found.items():
        params, grads, states = PLACES[offload]
        assert (facts["params"], facts["states"]) == ([params], [states]), offload
        assert facts["grads"][0].startswith(grads.split()[0]), offload
        assert facts["held"] == facts["estimate"], offload
        device_bytes = sum(facts["held"][:3]) - facts["held"][3]
        assert abs(facts["allocated"] - idle - device_bytes) <= 0.02 * sum(facts["held"][:3]), offload
        assert facts["weights"] == pytest.approx(found["NONE"]["weights"], rel=1e-4, abs=1e-3), offload
