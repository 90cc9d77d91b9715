"""`%memory` and planned programs in a notebook: questions, names, and cells that are planned."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from axon_nb import plan
from axon_nb.parallel.models import GPTConfig
from tests.support.browser.notebook_page import CLOSE_PANELS, model_of, send_from_page
from tests.support.kernel import Kernel

pytestmark = pytest.mark.timeout(1200)

LIMIT_S = 400.0
"""Of a cell that waits for a simulation, which by itself gives up after 150 s."""

MODELS = """%%distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from axon_nb.parallel import DDP, FSDP, ColumnParallelLinear, Muon, Parallel3D, Pipeline, ShardingStrategy, make_mesh
from axon_nb.parallel import checkpoint_blocks
from axon_nb.parallel.models import GPT, Block, GPTConfig, next_byte_loss
class T_Net(nn.Module):  # of the cell: another process knows it only as it is sent
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
    def forward(self, x, *, twice=False):
        return self.down(torch.relu(self.up(x)))
torch.manual_seed(0)
t_gpt = FSDP(GPT(GPTConfig(context=16, blocks=2)), strategy=ShardingStrategy.SHARD_GRAD_OP)
t_gpt_steps = t_gpt.optimizer(torch.optim.AdamW)
t_net = T_Net()
fully_shard(t_net.up, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
_ = fully_shard(t_net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
t_steps_of_net = torch.optim.SGD(t_net.parameters(), lr=0.1, momentum=0.9)
t_ddp = DDP(T_Net())
class T_Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.zeros(4, 8, 16))
    def forward(self, x):
        return x @ self.up[0]
t_experts = T_Experts()
t_two = T_Net()
fully_shard(t_two)
t_muon = Muon([t_two.up.weight, t_two.down.weight])
t_biases = torch.optim.AdamW([t_two.up.bias, t_two.down.bias])
t_hybrid = T_Net()
_ = fully_shard(t_hybrid, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
t_again = GPT(GPTConfig(blocks=2))
_ = checkpoint_blocks(t_again, Block)
t_column = nn.Sequential(ColumnParallelLinear(8, 8))
t_pipe = Pipeline([nn.Linear(4, 4) for _ in range(world_size)], num_microbatches=4)
t_layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
t_three_d = Parallel3D(t_layers, make_mesh(pp=2, dp=2), loss=nn.functional.mse_loss)
t_three_d_steps = torch.optim.AdamW(t_three_d.parameters())
t_train = lambda: t_gpt(torch.zeros(4, 16, dtype=torch.int64)).mean().backward() or t_gpt_steps.step()"""
ASK = """import json, time
from msgspec import structs, to_builtins
from axon_nb.cluster.session import current
from axon_nb.cluster.inspection.memory import request_memory, request_plan
def t_plan(*names, asked=None):
    end = time.monotonic() + 180
    while (found := request_plan(current.require("test").state, names, asked, "")).is_pending:
        assert time.monotonic() < end
        time.sleep(0.1)
    return to_builtins(structs.replace(found, model=None)) | {"sent": len(found.model or b"")}
def t_until(condition, limit=360):
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, t_panel.what_if.state
        time.sleep(0.05)
def t_wait(reached):
    t_until(lambda: reached(t_panel.what_if.state))
    return to_builtins(t_panel.what_if.state)"""

SETUP = """%%distributed
from types import SimpleNamespace
from torch import nn
from axon_nb.parallel import FSDP, Pipeline
from axon_nb.parallel.models import GPT, GPTConfig
config = GPTConfig(vocab=64, context=16, hidden=32, heads=4, blocks=8)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    def forward(self, x):
        return self.inner(x)
net = Net()
gpt = GPT(config)
trainer = SimpleNamespace(model=FSDP(GPT(config)))
pipe = Pipeline.split(GPT(config))
number = 3
if rank == 2: alone = nn.Linear(8, 8)
"""

PLANNED_SETUP = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

width = 64

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return self.layer(x)
"""
CELL = """%%plan -n 64 --card h100 --out planned
model = DistributedDataParallel(Net().to(device), device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(8, width, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def ready(shared_kernel: Kernel) -> Iterator[Kernel]:
    shared_kernel.ok(MODELS, timeout=LIMIT_S)
    shared_kernel.ok(ASK)
    yield shared_kernel
    shared_kernel.ok(CLOSE_PANELS)


def ask(kernel: Kernel, panel: str, setup: dict[str, str] | None) -> None:
    """What a page sends when somebody asks what if."""
    send_from_page(kernel, panel, {"op": "what_if", "setup": setup})


def reported(kernel: Kernel, expression: str) -> Any:
    """A value of the notebook, by JSON."""
    return json.loads(kernel.ok(f"print(json.dumps({expression}))", timeout=LIMIT_S).stdout)


def test_ranks_report_training_setup(ready: Kernel) -> None:
    gpt = reported(ready, "t_plan('t_gpt')")
    setup = gpt["facts"]["setup"]
    assert [setup[name] for name in ("world_size", "strategy", "optimizer", "cpu_offload")] == [
        4, "shard_grad_op", "adamw", "none"
    ]  # fmt: skip
    assert gpt["facts"]["is_trained_so"]
    assert gpt["facts"]["loss"] == "tokens"
    assert gpt["facts"]["units"] == ["Block", "Embedding", "Head"]
    assert gpt["sent"] > 0
    net = reported(ready, "t_plan('t_net', 't_steps_of_net')")["facts"]
    setup = net["setup"]
    assert (setup["strategy"], setup["mixed_precision"], setup["optimizer"], net["units"]) == (
        "full_shard", "bfloat16", "sgd with momentum", ["Linear"]
    )  # fmt: skip
    assert reported(ready, "t_plan('t_ddp')")["facts"]["setup"]["strategy"] == "ddp"
    hybrid = reported(ready, "t_plan('t_hybrid')")["facts"]["setup"]
    assert (hybrid["strategy"], hybrid["world_size"], hybrid["shard"]) == ("hybrid_shard", 4, 2)
    again = reported(ready, "t_plan('t_again')")["facts"]
    assert again["setup"]["activation_checkpointing"] is True
    assert (again["blocks"], again["is_trained_so"]) == (["Block"], False)
    assert again["notes"] == [
        "No optimizer for this model found among the variables; assuming Adam.",
        "The model is not wrapped; the first prediction is for full_shard on all 4 ranks.",
    ]


def test_formula_estimate_is_immediate(ready: Kernel) -> None:
    one = reported(ready, "t_plan('t_ddp', asked={'world_size': 1})")["states"]
    own = 4 * (64 * 128 + 128 + 128 * 64 + 64)
    assert one == {"parameters": own, "gradients": own, "optimizer": 2 * own}
    on_eight = {"world_size": 8, "strategy": "full_shard", "optimizer": "sgd"}
    eight = reported(ready, f"t_plan('t_ddp', asked={on_eight})")["states"]
    assert eight == {"parameters": own // 8, "gradients": own // 8}


def test_experts_and_sequences_can_be_shared_by_ranks(ready: Kernel) -> None:
    reported(ready, "t_plan('t_gpt')")  # the next call is recorded
    ready.ok("%%distributed --quiet\nt_train()")
    facts = reported(ready, "t_plan('t_gpt', asked={'cp': 2, 'batch': 4})")
    assert facts["facts"]["axes"] == ["cp"]
    assert facts["states"] == reported(ready, "t_plan('t_gpt')")["states"], "four ranks share the states in either way"
    simulated = "from axon_nb import plan\nfrom axon_nb.cluster.inspection.memory import plan_options"
    simulated += "\ndef t_simulated(**asked):\n    request_plan(current.require('test').state, ['t_gpt'], asked, '')"
    simulated += "\n    found = request_plan(current.require('test').state, ['t_gpt'], asked, '')"
    simulated += "\n    options = plan_options(found.setup, found.facts, plan.TensorSpec)"
    simulated += "\n    return plan.memory(plan.CapturedModel('model', found.model), **options).worst.peak.activations"
    ready.ok(simulated)
    whole, half = (reported(ready, f"t_simulated(cp={cp}, batch=64, world_size=2)") for cp in (1, 2))
    assert 0.4 < half / whole < 0.6
    experts = reported(ready, "t_plan('t_experts', asked={'ep': 4, 'strategy': 'ddp'})")
    assert experts["facts"]["axes"] == ["ep"]
    assert experts["states"]["parameters"] == 8 * 16 * 4
    refused = reported(ready, "t_plan('t_experts', asked={'ep': 2, 'world_size': 3})")["refused"]
    assert refused == "3 ranks with ep=2: the number must be a multiple of 2."


def test_each_parameter_has_the_states_of_its_own_optimizer(ready: Kernel) -> None:
    ready.ok("%%distributed --quiet\nt_two(torch.ones(2, 64)).sum().backward()\nt_muon.step()\nt_biases.step()")
    asked = "request_memory(current.require('test').state, ['t_two', 't_muon', 't_biases'])"
    for rank in range(4):
        estimated, held = (
            reported(ready, f"{asked}.{what}[{rank}].by_role['optimizer']") for what in ("estimated", "measured")
        )
        assert estimated == (64 * 128 * 2 + 2 * (128 + 64)) * 4 // 4
        assert 0 <= held - estimated < 100, "AdamW counts its steps, too"


def test_unplannable_model_reports_cause(ready: Kernel) -> None:
    for name, words in {
        "t_column": "The model's layers were sharded by hand (ColumnParallelLinear)",
        "t_nothing": "variable 't_nothing' does not exist.",
        "t_train": "'t_train' has type function: `%memory` accepts modules and optimizers.",
        "t_gpt_steps": "A plan needs one model, but t_gpt_steps holds 0. Name one: `%memory model`.",
    }.items():
        assert reported(ready, f"t_plan({name!r})")["refused"].startswith(words)
    refused = reported(ready, "t_plan('t_ddp', asked={'strategy': 'everything'})")["refused"]
    assert refused.startswith("strategy must be one of full_shard")


def test_pipeline_is_assembled_from_its_ranks(ready: Kernel) -> None:
    before = reported(ready, "t_plan('t_pipe')")
    assert before["facts"]["inputs"] is None
    assert before["sent"] > 0
    ready.ok("%%distributed\nt_pipe.step(torch.randn(8, 4), torch.zeros(8, 4), nn.functional.mse_loss)")
    facts = reported(ready, "t_plan('t_pipe')")["facts"]
    assert facts["inputs"] == [{"shape": [8, 4], "dtype": "float32"}]
    assert [facts["setup"][name] for name in ("world_size", "pp", "tp", "num_microbatches", "batch")] == [4, 4, 1, 4, 8]
    assert (facts["schedule"], facts["is_trained_so"]) == ("1F1B", True)
    three_d = reported(ready, "t_plan('t_three_d')")
    setup = three_d["facts"]["setup"]
    assert [setup[name] for name in ("world_size", "pp", "tp", "strategy")] == [4, 2, 1, "shard_grad_op"]
    assert three_d["sent"] > 0


@pytest.mark.slow
def test_panel_replies_without_blocking_the_notebook(ready: Kernel) -> None:
    panel = model_of(ready.ok("%memory t_gpt"))
    ready.ok("t_panel = current.session().panels['memory', 't_gpt']")
    ask(ready, panel, None)
    ready.ok("_ = t_wait(lambda state: state.estimate is not None and not state.doing)", timeout=LIMIT_S)
    # Seen once, what the model is called with makes the panel simulate of itself.
    ready.ok("%%distributed\nt_train()")
    ready.ok("t_state = t_wait(lambda state: state.reference is not None and not state.doing)", timeout=LIMIT_S)
    reference = reported(ready, "t_state['reference']")
    assert reference["method"].startswith("simulated")
    assert sorted(reference["persistent"]) == ["0", "1", "2", "3"]
    # The view is given each state a moment after it was reached.
    shown = "t_panel.view.to_bundle()['text/plain'].splitlines()"
    ready.ok(f"t_until(lambda: sum('simulated; ' in line for line in {shown}) == 4)", timeout=LIMIT_S)
    uses = "request_memory(current.require('test').state, ['t_gpt']).measured"
    measured = reported(ready, f"{{rank: dict(use.by_role) for rank, use in {uses}.items()}}")
    assert set(measured) == set("0123")
    for rank, sizes in measured.items():
        for role in ("parameters", "gradients"):
            assert reference["persistent"][rank][role] == sizes[role], (rank, role)
        assert 0 <= sizes["optimizer"] - reference["persistent"][rank]["optimizer"] < 1000, "Adam counts its steps, too"
    # Other ranks, another strategy: asked while a cell runs, and the notebook is free meanwhile.
    ready.ok(
        "%%distributed --noblock --out t_job --quiet\nimport time\nwhile not globals().get('t_go'): time.sleep(0.05)"
    )
    ask(ready, panel, {"strategy": "ddp"})
    ask(ready, panel, {"world_size": "8", "batch": "2"})
    assert ready.value("1 + 1") == 2
    reached = "own.setup.world_size == 8 and own.estimate is not None and own.estimate.is_whole"
    ready.ok(f"t_state = t_wait(lambda own: {reached})", timeout=LIMIT_S)
    ready.ok("t_job.cancel()\n_ = t_job.wait(100)")
    answer = reported(ready, "t_state['estimate']")
    assert answer["setup"]["world_size"] == 8
    eighth, quarter = answer["persistent"]["0"]["parameters"], reference["persistent"]["0"]["parameters"]
    assert quarter / 2 <= eighth <= quarter / 2 * 1.05
    shown = "'proposed, at the peak' in t_panel.view.to_bundle()['text/plain']"
    ready.ok(f"t_until(lambda: {shown})", timeout=LIMIT_S)
    # An error is a sentence of the panel; the panel goes on.
    ask(ready, panel, {"batch": "-1"})
    assert reported(ready, "t_wait(lambda state: state.error)['error']").startswith("samples per rank: '-1': must be")
    assert ready.ok("%%distributed\nrank").ok


def test_forward_hook_is_not_copied_with_the_model(ready: Kernel) -> None:
    ready.ok("%memory t_ddp")
    reported(ready, "t_plan('t_ddp')")  # the hook is set by now
    lines = ready.ok("%%rank 0\nimport copy\ncopy.deepcopy(t_ddp.module)(torch.ones(2, 64)).shape").lines()
    assert lines == ["[rank 0] torch.Size([2, 64])"]
    ready.ok("%%distributed --quiet\nt_ddp(torch.ones(2, 64))")
    assert ready.ok("%%rank 0\nlen(t_ddp.module._forward_pre_hooks)").lines() == ["[rank 0] 0"]
    assert reported(ready, "t_plan('t_ddp')")["facts"]["inputs"] == [{"shape": [2, 64], "dtype": "float32"}]


@pytest.mark.slow
def test_what_if_of_a_pipeline_is_simulated(ready: Kernel) -> None:
    panel = model_of(ready.ok("%memory t_three_d"))
    ready.ok("t_panel = current.session().panels['memory', 't_three_d']")
    ask(ready, panel, None)
    ready.ok("_ = t_wait(lambda state: state.as_is is not None and not state.doing)", timeout=LIMIT_S)
    ready.ok("%%distributed\nt_three_d.step(torch.randn(8, 8), torch.zeros(8, 8))\nt_three_d_steps.step()")
    ready.ok("t_state = t_wait(lambda state: state.reference is not None and not state.doing)", timeout=LIMIT_S)
    reference = reported(ready, "t_state['reference']")
    own = 2 * 4 * (8 * 8 + 8) // 2  # two layers of a stage, shared by two ranks
    for rank in ("0", "1", "2", "3"):
        assert reference["persistent"][rank]["parameters"] == own
        assert reference["persistent"][rank]["optimizer"] == 2 * own
    ask(ready, panel, {"pp": "4", "tp": "1", "num_microbatches": "4"})
    ready.ok("t_state = t_wait(lambda state: state.setup.pp == 4 and not state.doing)", timeout=LIMIT_S)
    asked = reported(ready, "t_state")
    assert asked["error"] == ""
    assert asked["estimate"]["persistent"]["0"]["parameters"] == 4 * (8 * 8 + 8)
    ask(ready, panel, {"world_size": "5"})
    ready.ok("t_state = t_wait(lambda state: state.error)", timeout=LIMIT_S)
    assert "must be a multiple of 2" in reported(ready, "t_state")["error"]


@pytest.fixture(scope="module")
def planner(shared_kernel: Kernel) -> Kernel:
    shared_kernel.ok(SETUP)
    shared_kernel.ok("from axon_nb import plan")
    return shared_kernel


def test_model_on_the_ranks_is_planned_by_name(planner: Kernel) -> None:
    has_torch = "'torch' in __import__('sys').modules"
    before = planner.value(has_torch)  # tests of this session may have loaded it
    planner.ok("planned = plan.memory('trainer.model', 64, device='cpu', batch=2)", timeout=500)
    config = GPTConfig(vocab=64, context=16, hidden=32, heads=4, blocks=8)
    formula = plan.memory(config, 64, device="cpu", method="closed_form")
    assert planner.value("planned.model, planned.num_parameters") == ("GPT", formula.num_parameters)
    assert planner.value("planned.worst.persistent.model_states") == formula.worst.persistent.model_states
    assert planner.value("planned.method") == "simulated with 4 and 5 of 8 equal blocks, scaled to all"
    assert planner.value(has_torch) == before


@pytest.mark.parametrize(("name", "elements"), [("net", 280), ("trainer.model.module.head", 2112), ("alone", 72)])
def test_modules_of_every_rank_can_be_named(planner: Kernel, name: str, elements: int) -> None:
    planner.ok("from axon_nb.plan.models import sendable_model")
    factory = pickle.loads(planner.value(f"sendable_model({name!r}).factory"))
    assert sum(parameter.numel() for parameter in factory().parameters()) == elements


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("modle", "'modle' does not exist (name 'modle' is not defined)"),
        ("gpt.head.nothing", "'gpt.head.nothing' does not exist ('Head' object has no attribute 'nothing')"),
        ("number", "number must be a torch.nn.Module; it has type int."),
        ("pipe", "A Pipeline holds only its own rank's stages: call plan.capture(model) before wrapping it"),
    ],
)
def test_unusable_names_get_one_sentence(planner: Kernel, name: str, sentence: str) -> None:
    reply = planner.run(f"plan.memory({name!r}, 64)")
    assert reply.ename == "PlanError"
    assert sentence in reply.evalue
    assert len(reply.evalue) < 400


def test_cell_is_planned_with_notebook_variables(kernel_for_clusters: Kernel) -> None:
    kernel = kernel_for_clusters
    kernel.ok(PLANNED_SETUP)
    reply = kernel.ok(CELL)
    text = "\n".join(bundle.get("text/plain", "") for bundle in reply.displays)
    assert "on 64 ranks of h100" in text
    assert "]:2 model = DistributedDataParallel" in text  # as the notebook numbers the lines
    assert "all_reduce" in text
    assert any("application/vnd.jupyter.widget-view+json" in bundle for bundle in reply.displays)  # the timeline
    assert kernel.value("[one.ranks == tuple(range(64)) for one in planned.ranks]") == [True]
    assert kernel.value("'model' in globals() or torch.distributed.is_initialized()") is False


def test_unplannable_cell_reports_cause(kernel_for_clusters: Kernel) -> None:
    kernel = kernel_for_clusters
    kernel.ok(f"{PLANNED_SETUP}\nimport threading\nlock = threading.Lock()")
    for cell, said in (
        ("%%plan -n 2\nif torch.ones(3).sum() > 2:\n    pass", "Line 2 of In ["),
        ("%%plan -n 2\nlock.acquire()", "The cell uses 'lock'"),
        ("%%plan -n 2 --card b1000\n1", "device must be one of"),
        ("%%plan -n 2\n# nothing", "%%plan needs the code that trains"),
        ("%%plan\n1", "-n"),
    ):
        reply = kernel.run(cell)
        assert not reply.ok
        assert said in reply.evalue, (cell, reply.evalue)
