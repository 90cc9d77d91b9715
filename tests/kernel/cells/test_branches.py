"""`--branch`, `--try` and `--compare`: what they show and restore; seeds, and draws that ranks should not share."""

from __future__ import annotations

import pytest

from axon_nb.cluster.failures import shared_draws_hint
from axon_nb.records.protocol.cells import CellEnd, Draws
from tests.support.kernel import Kernel

CELL = """%%distributed --branch t_lr=0.5,0.25 --keep best:loss --out t_branches
import axon_nb
t_w = 10.0
for step in range(4):
    t_w -= t_lr * t_w
    axon_nb.log(loss=t_w, step=step)
"""

DRAW = "import random, numpy\n(random.random(), float(numpy.random.rand()), float(torch.rand(1)))"
TRAIN = """%%distributed
from torch import nn
t_a_loader = t_a_model = None
from torch.utils.data import DataLoader, TensorDataset
t_model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
t_loader = DataLoader(TensorDataset(torch.zeros(8, 4)), batch_size=4, shuffle=True)
"""
STEP = "%%distributed\nfor (x,) in t_loader:\n    t_model(x).sum().backward()"
FORGET = "__import__('axon_nb').cluster.current.get().health._hinted.clear()"


def test_table_shows_each_value_with_its_curve(kernel: Kernel) -> None:
    reply = kernel.ok(CELL)
    assert reply.lines()[-1] == "Kept t_lr = 0.5: the cell ran with it once more."
    (bundle,) = (bundle for bundle in reply.displays if "text/html" in bundle)
    assert bundle["text/html"].count('alt="loss from ') == 2
    assert "finished, kept" in bundle["text/html"]
    assert "t_lr state" in " ".join(bundle["text/plain"].split())
    assert kernel.ok("%%rank 0\nprint(t_w)").lines() == ["[rank 0] 0.625"]
    assert kernel.value("t_branches.kept") == "0.5"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--keep best:loss", "--keep best:loss needs --branch"),
        ("--branch t_lr=1,2 --noblock", "--branch does not go with --noblock."),
        ("--branch t_lr=1,2 --try", "--branch does not go with --try."),
        ("--branch t_lr", "name a variable and its values, such as --branch lr=1e-3,3e-4."),
    ],
)
def test_options_that_do_not_go_together_get_one_sentence(kernel: Kernel, options: str, sentence: str) -> None:
    assert sentence in kernel.run(f"%%distributed {options}\npass").traceback


TROUBLES = {
    "raises": "1 / (rank - 1)",
    "is late": "time.sleep(1000 * rank)",
    "is interrupted": "print('go', flush=True)\ntime.sleep(1000)",
}
"""By what happens to the cell, its last lines."""


@pytest.fixture
def model(kernel: Kernel) -> Kernel:
    kernel.ok("%%distributed\nimport time\nt_model, t_runs = torch.nn.Linear(2, 1), 0")
    return kernel


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("option", ["--try", "--compare", "--branch t_k=1,2"])
def test_state_is_restored_however_the_cell_ends(model: Kernel, option: str, trouble: str) -> None:
    state = "%%distributed\n(t_runs, t_model.weight.sum().item())"
    before = model.ok(state).lines()
    limit = " --timeout 3" if trouble == "is late" else ""
    cell = f"%%distributed {option}{limit}\nt_runs += 1\nt_model.weight.data.add_(1)\nt_model(torch.ones(1, 2))"
    request = model.submit(f"{cell}\n{TROUBLES[trouble]}")
    if trouble == "is interrupted":
        model.wait_for_output(request, "go", ranks=range(4))
        model.interrupt()
    reply = model.collect(request)
    model.settle()
    is_row = option.startswith("--branch") and trouble != "is interrupted"
    assert reply.status == ("ok" if is_row else "error"), reply.traceback
    assert model.ok(state).lines() == before


def _draws(kernel: Kernel) -> list[object]:
    kernel.ok(f"%%distributed --quiet --out t_draws\n{DRAW}")
    return list(kernel.value("list(t_draws.values.values())"))


def test_seed_is_equal_on_all_ranks(kernel: Kernel) -> None:
    reply = kernel.ok("%distributed seed 5")
    assert reply.lines() == ["Seeded random, numpy and torch on ranks 0-3 with 5."]
    first = _draws(kernel)
    assert first == [first[0]] * 4
    kernel.ok("%distributed seed 5")
    assert _draws(kernel) == first


def test_per_rank_seeds_differ(kernel: Kernel) -> None:
    kernel.ok("%distributed seed 5")
    shared = _draws(kernel)
    kernel.ok("%distributed seed 5 --per-rank")
    own = _draws(kernel)
    assert own[0] == shared[0]
    assert len(set(map(str, own))) == 4


@pytest.mark.parametrize("value", ["-1", "x", "1.5", "99999999999999999999"])
def test_seed_must_be_an_integer(kernel: Kernel, value: str) -> None:
    assert kernel.run(f"%distributed seed {value}").ename == "UsageError"


def test_equal_dropout_and_batches_give_one_hint(kernel: Kernel) -> None:
    kernel.ok(f"{TRAIN}t_a_loader, t_a_model = t_loader, t_model  # of an earlier cell")
    kernel.ok(FORGET)
    kernel.ok("%distributed seed 0")
    text = kernel.ok(STEP).stdout
    assert "Hint: ranks 0-3 drew the same random numbers" in text
    assert "dropout masks of `t_model`" in text
    assert "`t_loader` shuffles identically" in text
    assert "`%distributed seed 0 --per-rank`" in text
    assert "Hint" not in kernel.ok(STEP).stdout


@pytest.mark.parametrize(
    "prepare", ["%distributed seed 0 --per-rank", "%%distributed\nt_model.eval()\nt_loader = [(torch.zeros(4, 4),)];"]
)
def test_no_hint_without_a_reason(kernel: Kernel, prepare: str) -> None:
    kernel.ok(TRAIN)
    kernel.ok(FORGET)
    kernel.ok("%distributed seed 0")
    kernel.ok(prepare)
    assert "Hint" not in kernel.ok(STEP).stdout


def test_distributed_sampler_with_another_order_on_a_rank_gives_a_hint(kernel: Kernel) -> None:
    kernel.ok(TRAIN)
    kernel.ok(FORGET)
    made = (
        "%%distributed\nfrom torch.utils.data import DistributedSampler\n"
        "t_data = TensorDataset(torch.zeros(8, 4))\n"
        "t_loader = DataLoader(t_data, batch_size=2, sampler=DistributedSampler(t_data, seed={seed}))"
    )
    kernel.ok(made.format(seed=0))
    assert "repeat samples" not in kernel.ok(STEP).stdout
    kernel.ok(made.format(seed="rank"))
    text = kernel.ok(STEP).stdout
    assert "`t_loader` has seed 0 and epoch 0 on rank 0; `t_loader` has seed 1 and epoch 0 on rank 1. Give" in text
    kernel.ok(FORGET)
    kernel.ok(made.format(seed=0))
    text = kernel.ok(
        f"{STEP.replace('for', 'if rank == 3: t_loader.sampler.set_epoch(1)' + chr(10) + 'for', 1)}"
    ).stdout
    assert "`t_loader` has seed 0 and epoch 0 on rank 0; `t_loader` has seed 0 and epoch 1 on rank 3. Give" in text


def test_differing_or_unknown_draws_give_no_hint() -> None:
    same = CellEnd(draws=Draws(states=("a", "b"), dropout="m", loader=""))
    other = CellEnd(draws=Draws(states=("a", "c"), dropout="m", loader=""))
    assert "masks of `m`" in shared_draws_hint({0: same, 1: same}, [0, 1])
    assert shared_draws_hint({0: same, 1: other}, [0, 1]) == ""
    assert shared_draws_hint({0: same}, [0]) == ""
    assert shared_draws_hint({0: same, 1: CellEnd()}, [0, 1]) == ""
