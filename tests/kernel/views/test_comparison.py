"""`%%distributed --compare`: the report in a notebook, and what cannot be compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cases.planted_faults import FAULTS, PROGRAMS
from tests.support.kernel import Kernel

PROGRAM = Path(__file__).parents[2] / "support" / "programs" / "compared.py"

PREPARE = """%%distributed
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
cmp_model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
cmp_optimizer = torch.optim.AdamW(cmp_model.parameters(), lr=0.01)
cmp_x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
cmp_y = torch.randn(3, 1, generator=torch.Generator().manual_seed(9 + rank))
"""
STEP = """
cmp_optimizer.zero_grad()
nn.functional.mse_loss(cmp_model(cmp_x), cmp_y).backward()
cmp_optimizer.step()
"""
FOUND = "(cmp_verdict.finding.name, cmp_verdict.finding.cause) if cmp_verdict.finding else ('', 'agrees')"
SUM = "%%rank 0\nsum(p.double().sum().item() for p in cmp_model.parameters())"


@pytest.fixture
def ready(kernel: Kernel) -> Kernel:
    kernel.ok(PREPARE)
    return kernel


def test_right_program_agrees_and_the_state_is_restored(ready: Kernel) -> None:
    before = ready.ok(SUM).lines()
    reply = ready.ok(f"%%distributed --compare --out cmp_verdict\n{STEP}")
    (bundle,) = (bundle for bundle in reply.displays if "text/html" in bundle)
    assert "All ranks compared with one rank" in bundle["text/html"]
    assert "agree with those of one rank.\nGlobal batch: cmp_x, cmp_y." in bundle["text/plain"]
    assert ready.ok(SUM).lines() == before
    assert ready.value("cmp_verdict.finding is None")


def test_wrong_scale_is_reported_with_module_factor_and_cause(ready: Kernel) -> None:
    wrong = STEP.replace("cmp_y).backward", "cmp_y).mul(world_size).backward")
    ready.ok(f"%%distributed --compare --out cmp_verdict\n{wrong}")
    assert ready.value("cmp_verdict.finding.cause") == "scaled by world size"
    assert ready.value("cmp_verdict.finding.what") == "the gradient"


CUT_BY_RANK = """%%distributed
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
torch.manual_seed(0)
cut_net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
cut_model = nn.parallel.DistributedDataParallel(cut_net)
cut_optimizer = torch.optim.AdamW(cut_model.parameters(), lr=0.01)
cut_x, cut_y = torch.randn(16, 4), torch.randn(16, 4)
cut_labels, cut_data = torch.arange(16) % 4, TensorDataset(cut_x, cut_y)
"""
CUT_STEP = """
cut_optimizer.zero_grad()
nn.functional.mse_loss(cut_model(cut_x{0}), cut_y{0}).backward()
cut_optimizer.step()
"""
LOADER = """
sampler = DistributedSampler(cut_data, num_replicas=world_size, rank=rank)
for x, y in DataLoader(cut_data, batch_size=2, sampler=sampler):
    cut_optimizer.zero_grad()
    nn.MSELoss()(cut_model(x), y).backward()
    cut_optimizer.step()
"""
HAND = """
x, y = cut_x.chunk(world_size)[rank], cut_y.chunk(world_size)[rank]
cut_optimizer.zero_grad()
((cut_net(x) - y) ** 2).mean().backward()
for p in cut_net.parameters():
    dist.all_reduce(p.grad)
    p.grad /= world_size
cut_optimizer.step()
"""
SLICE = "[rank * 4:(rank + 1) * 4]"
LABELS = CUT_STEP.replace("mse_loss", "cross_entropy").replace("cut_y", "cut_labels")
RIGHT = {
    "slice": CUT_STEP.format(SLICE),
    "chunk": CUT_STEP.format(".chunk(world_size)[rank]"),
    "stride": CUT_STEP.format("[rank::world_size]"),
    "sampler": LOADER,
    "reduced by hand": HAND,
    "labels that are equal on all ranks": LABELS.format(SLICE),
    "mask": "mask = torch.arange(16) % world_size == rank" + CUT_STEP.format("[mask]"),
}
WRONG = {
    "sum for mean": (RIGHT["slice"].replace(").backward", ", reduction='sum').backward"), "scaled by world size"),
    "sum not divided": (HAND.replace("    p.grad /= world_size\n", ""), "scaled by world size"),
    "nothing reduced": (
        HAND.replace("dist.all_reduce(p.grad)", "pass").replace("/= world_size", "/= 1"),
        "missing all-reduce",
    ),
    "one part for all": (CUT_STEP.format(".chunk(world_size)[0]"), "same part"),
    "sampler of rank 0 for all": (LOADER.replace("rank=rank", "rank=0"), "same part"),
}


def test_batches_cut_by_rank_in_the_cell_are_joined(kernel: Kernel) -> None:
    kernel.ok(CUT_BY_RANK)
    found = {}
    for what, cell in RIGHT.items():
        kernel.ok(f"%%distributed --compare --out cmp_verdict\n{cell}")
        found[what] = kernel.value(FOUND)
        assert kernel.value("cmp_verdict.batch")[0] == "the parts that the cell cuts on each rank"
    assert found == dict.fromkeys(RIGHT, ("", "agrees"))
    for what, (cell, _) in WRONG.items():
        kernel.ok(f"%%distributed --compare --out cmp_verdict\n{cell}")
        found[what] = kernel.value(FOUND)[1]
    assert {what: found[what] for what in WRONG} == {what: cause for what, (_, cause) in WRONG.items()}
    # The same step on all ranks agrees with one rank, but no one means it.
    kernel.ok(f"%%distributed --compare --out cmp_verdict\n{CUT_STEP.format('[:4]')}")
    assert "So 4 ranks compute what one does" in kernel.value("str(cmp_verdict)")
    refused = kernel.run(f"%%distributed --compare\n{RIGHT['slice'].replace(f'cut_y{SLICE}', 'cut_y[:4]')}")
    assert "what is the same on all ranks is not a part" in refused.traceback


VARIED = """%%distributed
import torch.nn as nn, torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
def layers(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), *more, nn.Linear(16, 4))
model = nn.parallel.DistributedDataParallel(layers())
dropping = nn.parallel.DistributedDataParallel(layers(nn.Dropout(0.3)))
plain, sharded, policy = layers(), layers(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
for layer in (sharded[0], sharded[3], sharded):
    fully_shard(layer, mp_policy=policy)
optimizer = torch.optim.AdamW(sharded.parameters(), 1e-2)
torch.manual_seed(1)
labels = torch.arange(4) % 4
x, y = (whole.chunk(world_size)[rank] for whole in (torch.randn(4 * world_size, 8), torch.randn(4 * world_size, 4)))
sgd = torch.optim.SGD([*model.parameters(), *dropping.parameters()], 1e-2)
"""
AUTOCAST = """
sgd.zero_grad()
with torch.autocast("cpu", torch.bfloat16):
    loss = F.mse_loss(model(x).float(), y)
loss.backward()
sgd.step()
"""
MICROBATCHES = """
sgd.zero_grad()
for i, (part, target) in enumerate(zip(x.chunk(2), y.chunk(2))):
    model.require_backward_grad_sync = i == 1
    (F.mse_loss(model(part), target) / 2).backward()
sgd.step()
"""
SHARDED = """
optimizer.zero_grad()
F.mse_loss(sharded(x).float(), y).backward()
optimizer.step()
"""
STEP_OF = """
sgd.zero_grad()
F.mse_loss({0}, y).backward()
sgd.step()
"""


def test_mixed_precision_and_microbatches_agree_unless_they_are_wrong(kernel: Kernel) -> None:
    kernel.ok(VARIED)
    kernel.ok(f"%%distributed\n{MICROBATCHES}")  # leaves its own parts in `part` and `target`
    by_label = MICROBATCHES.replace("y.chunk", "labels.chunk").replace("mse_loss", "cross_entropy")
    right = {
        "autocast": AUTOCAST,
        "microbatches": MICROBATCHES,
        "labels that are equal on all ranks": by_label,
        "sharded": SHARDED,
    }
    wrong = {
        "autocast, twice": (AUTOCAST.replace(", y)", ", y, reduction='sum')"), "scaled by world size"),
        "sharded, twice": (SHARDED.replace(").backward", ").mul(world_size).backward"), "scaled by world size"),
        "last microbatch alone": (MICROBATCHES.replace("i == 1", "i == 0"), "missing all-reduce"),
        "cut twice": (STEP_OF.format("model(x.chunk(world_size)[rank])").replace(", y)", ", y[rank:rank + 1])"),
                      "other batch"),
        "its own mean": (STEP_OF.format("model(x - x.mean(0))"), "other batch"),
        "evaluation on one rank": ("dropping.train(rank != 1)" + STEP_OF.format("dropping(x)"), "training mode"),
        "another learning rate": ("sgd.param_groups[0]['lr'] = 0.01 * (1 + rank)" + STEP_OF.format("model(x)"),
                                  "optimizer settings"),
    }  # fmt: skip
    found = {}
    for what, cell in [*right.items(), *((what, cell) for what, (cell, _) in wrong.items())]:
        kernel.ok(f"%%distributed --compare {'plain' if 'sharded' in cell else ''} --out cmp_verdict\n{cell}")
        found[what] = kernel.value(FOUND)[1]
        if what == "another learning rate":
            assert "lr of sgd is 0.01 on rank 0, 0.02 on rank 1, 0.03 on rank 2" in kernel.value("str(cmp_verdict)")
    assert found == dict.fromkeys(right, "agrees") | {what: cause for what, (_, cause) in wrong.items()}


ZERO = PREPARE.replace("import torch.nn as nn", "import torch.nn as nn\nfrom torch.distributed.optim import *").replace(
    "torch.optim.AdamW(cmp_model.parameters(), ",
    "ZeroRedundancyOptimizer(cmp_model.parameters(), optimizer_class=torch.optim.AdamW, ",
)


def test_zero_optimizer_agrees_with_all_states_and_goes_on(kernel: Kernel) -> None:
    kernel.ok(f"{ZERO}{STEP}{STEP}")
    kernel.ok(f"%%distributed --compare --out cmp_verdict\n{STEP}")
    assert kernel.value(
        "(cmp_verdict.finding is None, sum(dict(cmp_verdict.counts)['the weight after the step']))"
    ) == (
        True,
        4,
    )
    wrong = STEP.replace(
        "cmp_optimizer.step()", "cmp_optimizer.param_groups[0]['lr'] *= 1 + rank\ncmp_optimizer.step()"
    )
    kernel.ok(f"%%distributed --compare --out cmp_verdict\n{wrong}")
    assert kernel.value("cmp_verdict.finding.what") == "the weight after the step"
    before = kernel.ok(SUM).lines()
    kernel.ok(f"%%distributed\n{STEP}")
    assert kernel.ok(SUM).lines() != before
    assert kernel.ok("%%distributed\nsum(p.double().sum().item() for p in cmp_model.parameters())").lines() != []


@pytest.fixture
def programs(kernel: Kernel) -> Kernel:
    """The kernel, whose ranks can make the programs."""
    kernel.ok(f"%%distributed\n{PROGRAM.read_text(encoding='utf-8')}")
    return kernel


def named(kernel: Kernel, program: str, setup: str = "", change: tuple[str, str] = ("", "")) -> tuple[str, str]:
    """Compare a program, and return which module is named first, with which cause."""
    made, (old, new) = PROGRAMS[program], change
    kernel.ok(f"%%distributed\n{made.setup}{setup}")
    cell = made.cell.replace(old, new) if old else made.cell
    kernel.ok(f"%%distributed --compare {made.plain} --out cmp_verdict\n{cell}")
    name, cause = kernel.value(FOUND)
    return name, cause


def test_pipeline_agrees_although_its_first_step_infers_shapes(programs: Kernel) -> None:
    assert named(programs, "pipeline") == ("", "agrees")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_right_random_models_agree_in_each_precision(programs: Kernel, program: str, dtype: str) -> None:
    wrong = []
    for seed in range(1, 16):
        programs.ok(f"%%distributed\nSEED, DTYPE = {seed}, torch.{dtype}")
        if (answer := named(programs, program)) != ("", "agrees"):
            wrong.append((seed, answer))
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_planted_faults_are_named_with_module_and_cause(programs: Kernel, program: str) -> None:
    planted = [fault for fault in FAULTS if fault.program == program]
    missed = []
    for fault in planted:
        name, cause = named(programs, program, fault.setup, fault.change)
        is_found = name.startswith(fault.module) and cause == fault.cause
        print(f"| {program} | {fault.what} | {name} | {cause} | {'yes' if is_found else 'no'} |")
        missed += [] if is_found else [(fault.what, name, cause)]
    assert len(missed) <= 0.1 * len(planted), missed


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        ("--compare\ncmp_z = 1", "--compare found no model: the cell must use a variable"),
        ("--compare --ranks 0\ncmp_model(cmp_x)", "--compare runs the cell on all ranks: leave --ranks out."),
        ("--compare cmp_x\ncmp_model(cmp_x)", "must be a variable of the ranks that holds the plain model."),
        ("--compare\ncmp_model(cmp_x + torch.rand_like(cmp_x))", "draws random numbers, so no two runs are alike"),
        ("--compare\ncmp_model(cmp_x)\ntorch.save(1, '/tmp/cmp.pt')", "The cell writes /tmp/cmp.pt, which the"),
        ("--compare\ndef cmp_f(:\n    pass", "SyntaxError: invalid syntax\nNo rank has run the cell."),
        ("--compare\n!true\ncmp_z = 1", "--compare found no model: the cell must use a variable"),
        ("--compare --try\npass", "--compare does not go with --try."),
    ],
)
def test_what_cannot_be_compared_gets_one_sentence(ready: Kernel, cell: str, sentence: str) -> None:
    assert sentence in ready.run(f"%%distributed {cell}").traceback
