"""Plans for models on the ranks, given by name."""

from __future__ import annotations

import pickle

import pytest

from axon_nb import plan
from axon_nb.parallel.models import GPTConfig
from tests.support.kernel import Kernel

pytestmark = pytest.mark.timeout(600)

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
