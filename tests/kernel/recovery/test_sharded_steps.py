"""A sharded model's step that is aborted anywhere and run again gives the same bits as an undisturbed one."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel

SETUP = """%%distributed
import warnings
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1, ShardingStrategy as OldStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from axon_nb.parallel import FSDP, CPUOffload, ShardingStrategy, ZeRO1, checkpoint_blocks

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(9, 21), nn.Linear(21, 9)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

warnings.filterwarnings("ignore", message=".*(NO_SHARD|deprecated)")

def net(checkpointed=False):
    torch.manual_seed(0)
    made = nn.Sequential(*(Residual() for _ in range(3)))
    if checkpointed:
        checkpoint_blocks(made, Residual)
    return made

class Old:  # FSDP1 with the methods of ours
    def __init__(self, strategy, **options):
        options |= {"auto_wrap_policy": ModuleWrapPolicy({Residual}), "device_id": torch.device("cpu")}
        self.root = FSDP1(net(), sharding_strategy=strategy, **options)
        self.module = [block.module for block in self.root.module]
        self.no_sync, self.clip_grad_norm = self.root.no_sync, self.root.clip_grad_norm_
    def __call__(self, x):
        return self.root(x)
    def optimizer(self, kind, **options):
        return kind(self.root.parameters(), **options)
    def full_state_dict(self):
        with FSDP1.summon_full_params(self.root):
            return {name: value.clone() for name, value in self.root.named_parameters()}

models = {
    "old": Old(OldStrategy.FULL_SHARD, use_orig_params=True),
    "old grad": Old(OldStrategy.SHARD_GRAD_OP),
    "old none": Old(OldStrategy.NO_SHARD, use_orig_params=True),
    "full": FSDP(net()),
    "grad": FSDP(net(True), strategy=ShardingStrategy.SHARD_GRAD_OP),
    "none": FSDP(net(), strategy=ShardingStrategy.NO_SHARD),
    "params": FSDP(net(), cpu_offload=CPUOffload.PARAMS),
    "states": FSDP(net(), cpu_offload=CPUOffload.OPTIMIZER_STATES),
    "zero": ZeRO1(net()),
}
optimizers = {name: model.optimizer(torch.optim.Adam, lr=0.01) for name, model in models.items()}
steps, breaking = 0, None

def update(name, accumulate=False):
    model, optimizer = models[name], optimizers[name]
    optimizer.zero_grad()
    x = torch.randn(8, 9, generator=torch.Generator().manual_seed(10 * steps + rank))
    if accumulate:
        with model.no_sync():
            model(x[:4]).square().mean().backward()
        x = x[4:]
    model(x).square().mean().backward()
    if name == breaking and rank == 1:
        raise ValueError("bug")
    model.clip_grad_norm(0.5)
    optimizer.step()

def step():
    global steps
    for name in models:
        update(name, accumulate=steps % 2 == 1)
    steps += 1

def weights():
    states = (model.full_state_dict() for model in models.values())
    return [sum(value.double().sum().item() for value in state.values()).hex() for state in states]

step()
"""

BREAKS = {
    "in the forward": "handle = inner[1].register_forward_pre_hook(boom)",
    "in the backward": "handle = inner[1].register_full_backward_hook(boom)",
    "while it accumulates": "handle = inner[2].register_full_backward_hook(boom)",
    "before the step": "breaking, handle = name, None",
}


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """Two ranks."""
    with Kernel() as kernel:
        kernel.load_and_warm_up()
        kernel.ok("%distributed start -n 2", timeout=120)
        yield kernel


@pytest.fixture(scope="module")
def undisturbed(kernel: Kernel) -> list[str]:
    """Weights after 3 steps."""
    kernel.ok(SETUP, timeout=120)
    return kernel.ok("%%distributed\nstep()\nstep()\nprint(*weights())").lines()


def break_off(kernel: Kernel, name: str, where: str) -> str:
    """Let rank 1 fail in a step of a model; returns what is shown."""
    reply = kernel.run(
        f"%%distributed\nname, inner = {name!r}, models[{name!r}].module\n"
        "def boom(*args):\n    handle.remove()\n    if rank == 1: raise ValueError('bug')\n"
        f"{BREAKS[where]}\nupdate(name, accumulate={'accumulates' in where})"
    )
    return reply.traceback


@pytest.mark.parametrize("where", BREAKS)
def test_rerun_step_is_bitwise_identical(kernel: Kernel, undisturbed: list[str], where: str) -> None:
    kernel.ok(SETUP, timeout=120)
    # Where every rank has whole gradients, nothing holds the others back before their steps: the cell reports them.
    whole = {"none", "old none"} if where == "before the step" else set()
    for name in sorted({"full", "grad", "none", "old", "old grad", "old none", "params", "states", "zero"} - whole):
        failed = break_off(kernel, name, where)
        assert "ValueError: bug" in failed, failed
    assert kernel.ok("%%distributed\nbreaking = None\nstep()\nstep()\nprint(*weights())").lines() == undisturbed


def test_partial_gradient_norm_is_explained_with_fix(kernel: Kernel, undisturbed: list[str]) -> None:
    reply = kernel.run("%%distributed\nif rank == 0: models['full'].clip_grad_norm(1.0)")
    assert "clip_grad_norm_" in reply.traceback
    assert "call it on every rank" in reply.traceback


# Alone: of four ranks the sums of the others depend on how their gradients are put into buckets.
HYBRID = re.sub(
    r"models = {.*?\n}",
    'models = {"hybrid": FSDP(net(), strategy=ShardingStrategy.HYBRID_SHARD, mesh=make_mesh(replicate=2, shard=2))}',
    SETUP.replace("import FSDP,", "import FSDP, make_mesh,"),
    flags=re.DOTALL,
)


@pytest.mark.slow
@pytest.mark.parametrize("where", [where for where in BREAKS if where != "before the step"])
def test_rerun_step_of_a_hybrid_model_is_bitwise_identical(shared_kernel: Kernel, where: str) -> None:
    shared_kernel.ok(HYBRID, timeout=120)
    undisturbed = shared_kernel.ok("%%distributed\nstep()\nstep()\nprint(*weights())").lines()
    shared_kernel.ok(HYBRID, timeout=120)
    failed = break_off(shared_kernel, "hybrid", where)
    assert "ValueError: bug" in failed, failed
    again = shared_kernel.ok("%%distributed\nbreaking = None\nstep()\nstep()\nprint(*weights())").lines()
    assert again == undisturbed
