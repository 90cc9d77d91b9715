"""Ordinary models sharded by a plan: training equals one process; the report; clear errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from axon_nb.comm import TensorError, World
from axon_nb.errors import UsageError
from axon_nb.parallel import axis_group, make_mesh, parallel_cross_entropy, parallelize
from axon_nb.parallel.checkpoint import Checkpoints
from axon_nb.parallel.models import CNN, GPT, MLP, GPTConfig, next_byte_loss
from tests.parallel.conftest import make
from tests.support.cases.pairwise import pairwise

CONFIG = GPTConfig(vocab=32, context=8, hidden=16, heads=4, blocks=2)
PLAN = {
    "block*.attention.[qkv]*": "column",
    "block*.attention.out": "row",
    "block*.up": "column",
    "block*.down": "row",
}
KINDS = ["plan", "auto", "parallel loss", "sequence", "sequence and loss"]
TOLERANCES = {torch.float64: 1e-10, torch.float32: 5e-6, torch.bfloat16: 2**-6}
"""Relative. bfloat16: two units in the last place, as sums over ranks are rounded in another order."""
COMPARED = {torch.float64: 3, torch.float32: 2, torch.bfloat16: 1}
"""Losses, gradients, parameters; AdamW divides by the root of the gradient, which is rounding where it is small."""


def gpt(dtype: torch.dtype, seed: int = 4) -> GPT:
    """Return a small GPT."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT(CONFIG).to(dtype)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets."""
    drawn = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(5))
    return drawn[:, :-1], drawn[:, 1:]


def train(model: nn.Module, loss_of: Any) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train two steps; return losses, the first gradients and the final parameters, all in full."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs, targets = tokens()
    losses, gradients = [], {}
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        if step == 0:
            gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients, {name: whole(parameter) for name, parameter in model.named_parameters()}


def whole(value: Any) -> torch.Tensor:
    """Return the full tensor."""
    tensor: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return tensor.detach().clone()


def cut(kind: str, model: nn.Module, mesh: Any = None) -> Any:
    """Shard a model in one of the ways; return its loss function."""
    loss = "loss" in kind
    if kind == "plan":
        parallelize(model, PLAN, mesh=mesh)
    else:
        parallelize(model, "auto", mesh=mesh, sequence="sequence" in kind, parallel_loss=loss)

    def parallel(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return parallel_cross_entropy(logits, targets, group=mesh)

    return parallel if loss else next_byte_loss


def assert_same(found: Any, expected: Any, tolerance: float) -> None:
    """Losses, gradients and parameters, relative to the largest of each."""
    losses, *tensors = found
    expected_losses, *expected_tensors = expected
    assert losses == pytest.approx(expected_losses, rel=tolerance)
    for mine, theirs in zip(tensors, expected_tensors, strict=True):
        assert mine.keys() == theirs.keys()
        largest = max(float(value.abs().max()) for value in theirs.values())
        for name, value in mine.items():
            assert float((value - theirs[name]).abs().max()) <= tolerance * largest, name


def test_step_sends_only_required_bytes(process_worlds: Any) -> None:
    from torch.distributed.tensor.debug import CommDebugMode  # imports torch._inductor, for seconds

    def work(world: World) -> Any:
        counts = []
        for kind in ("auto", "sequence and loss"):
            model = gpt(torch.float32)
            loss_of = cut(kind, model)
            inputs, targets = tokens()
            loss_of(model(inputs), targets)
            with CommDebugMode() as counted:
                loss_of(model(inputs), targets).backward()
            counts.append({str(name).rpartition(".")[2]: n for name, n in counted.get_comm_counts().items()})
        return counts

    for plain, sequence in make("ranks-2", process_worlds).run(work):
        # Two blocks with two sums each way, and the head's input backward; the logits are gathered.
        assert plain == {"all_reduce": 9, "all_gather_into_tensor": 1}
        # The same as scatters and gathers: 4 scatters forward, 5 backward.
        assert sequence["reduce_scatter_tensor"] == 9


@pytest.mark.parametrize(
    ("world", "dtype", "kind"),
    pairwise(
        ["ranks-2", "ranks-4", "mock-2"],
        list(TOLERANCES),
        KINDS,
        exists=lambda world, dtype, _: world != "ranks-4" or dtype is torch.float64,
    ),
    indirect=["world"],
    ids=str,
)
def test_gpt_trains_as_in_one_process(world: Any, dtype: torch.dtype, kind: str) -> None:
    def work(world: World) -> Any:
        model = gpt(dtype, seed=100 + world.rank())
        if world.rank() == 0:
            model.load_state_dict(gpt(dtype).state_dict())
        return train(model, cut(kind, model))

    expected = train(gpt(dtype), next_byte_loss)
    found = world.run(work)
    count = COMPARED[dtype]
    for result in found:
        assert_same(result[:count], expected[:count], TOLERANCES[dtype])
        for mine, theirs in zip(result[1:], found[0][1:], strict=True):
            assert all(torch.equal(value, theirs[key]) for key, value in mine.items())


def test_mesh_axis_and_checkpoint_for_one_process(process_worlds: Any, tmp_path: Any) -> None:
    def work(world: World, folder: str) -> Any:
        mesh = make_mesh(dp=2, tp=2, device="cpu")
        model = gpt(torch.float64)
        loss_of = cut("sequence and loss", model, mesh["tp"])
        found = train(model, loss_of)
        Checkpoints(folder).save(3, model=model)
        return found, axis_group(mesh, "tp").size()

    expected = train(gpt(torch.float64), next_byte_loss)
    for found, size in make("ranks-4", process_worlds).run(work, str(tmp_path)):
        assert size == 2
        assert_same(found, expected, 1e-10)
    alone = gpt(torch.float64, seed=9)
    with pytest.warns(UserWarning, match="saved by 4 ranks"):
        Checkpoints(tmp_path).load(3, model=alone)
    assert_same(
        ([], {name: whole(parameter) for name, parameter in alone.named_parameters()}), ([], expected[2]), 1e-10
    )


def test_report_lists_styles_and_reasons(two: Any) -> None:
    def work(world: World) -> Any:
        report = parallelize(gpt(torch.float32), "auto")
        odd = GPT(GPTConfig(vocab=33, context=8, hidden=18, heads=3, blocks=2))
        partly = parallelize(odd, "auto")
        inputs, targets = tokens()
        next_byte_loss(odd(inputs), targets).backward()
        layers = parallelize(MLP((6, 8, 8, 4)), "auto")
        return (
            str(report),
            report._repr_html_(),
            str(partly),
            str(layers),
            report.local_bytes,
            report.style("block1.up"),
        )

    for text, page, partly, layers, here, style in two.run(work):
        lines = text.splitlines()
        assert lines[0].startswith("15 of 22 modules sharded over 2 ranks: ")
        assert any(line.startswith("block*.attention.query (2)  Linear") and "16x16 -> 8x16" in line for line in lines)
        (token,) = [line for line in lines if line.startswith("embedding.token")]
        assert token.endswith("stays whole with 'auto'")
        assert page.startswith("<table><caption>15 of 22 modules sharded over 2 ranks")
        assert "<td style='text-align:left'>block*.up (2)</td>" in page
        assert style == "column"
        assert here < sum(p.nbytes for p in gpt(torch.float32).parameters())
        assert "block*.attention.key (2) " in partly
        assert "block*.attention.query: the number of heads must be divisible by the group size (2); got 3" in partly
        assert "out_features must be divisible by the group size (2); got 33" in partly
        assert any(line.startswith("block*.up (2)") and "72x18 -> 36x18" in line for line in partly.splitlines())
        assert [line.split()[2] for line in layers.splitlines()[2:]] == ["column", "row", "replicated"]


def test_invalid_plans_raise(two: Any) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model

    def sharded() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4))
        parallelize(model, {"0": "column"})
        return model

    def work(world: World) -> list[str]:
        heads = GPT(GPTConfig(vocab=32, context=8, hidden=18, heads=3, blocks=1))
        reported = []
        for model, plan, options in (
            (nn.Sequential(nn.Linear(4, 7)), {"0": "column"}, {}),
            (nn.Sequential(nn.Linear(4, 7)), {"1": "column"}, {}),
            (nn.Sequential(nn.Linear(4, 7)), {"0": "colum"}, {}),
            (nn.Sequential(nn.Linear(4, 8)), {"0": "column", "*": "row"}, {}),
            (CNN(), {"features.0": "column"}, {}),
            (heads, PLAN, {}),
            (heads, "auto", {"sequence": True}),
            (MLP(), "auto", {"sequence": True}),
            (tied(), {"0": "column"}, {}),
            (sharded(), {"0": "row"}, {}),
            (MLP(), "best", {}),
            (MLP(), make_mesh(tp=2, device="cpu"), {}),
        ):
            with pytest.raises(UsageError) as caught:
                parallelize(model, plan, **options)
            reported.append(str(caught.value))
        odd = gpt(torch.float32)
        parallelize(odd, "auto", sequence=True)
        with pytest.raises(TensorError) as caught:
            odd(torch.zeros(1, 7, dtype=torch.long))
        return [*reported, str(caught.value)]

    for reported in two.run(work):
        assert reported[0] == "0.out_features must be divisible by the group size (2); got 7. The next multiple is 8."
        assert reported[1] == "'1' matches no module; the modules are 0."
        assert reported[2].startswith("'0': style must be column, column+gather, row")
        assert reported[3] == "0 matches '0' and '*', which have different styles."
        assert reported[4] == "features.0: style 'column' supports nn.Linear and nn.Embedding; got Conv2d."
        assert reported[5].startswith("block0.attention.query: the number of heads must be divisible by")
        assert reported[6].startswith("block0.attention.query: the number of heads must be divisible by")
        assert reported[7].startswith("sequence=True with plan='auto' supports only")
        assert reported[8].startswith("0 shares a parameter with another module")
        assert reported[9].startswith("0.weight is a DTensor; call parallelize first")
        assert reported[10].startswith("plan must be 'auto' or map patterns")
        assert reported[11].endswith(" Name the mesh: `mesh=…`.")
        assert reported[12].startswith("sequence parallelism needs shape (…, positions, features)")


def test_parallel_cross_entropy_equals_torchs(world: Any) -> None:
    def work(world: World) -> Any:
        generator = torch.Generator().manual_seed(3)
        logits = 30 * torch.randn(5, 7, 12, generator=generator, dtype=torch.float64)
        targets = torch.randint(12, (5, 7), generator=generator)
        targets[1, :3] = -100
        mine = logits.chunk(world.world_size(), -1)[world.rank()].clone().requires_grad_()
        logits.requires_grad_()
        gaps = []
        for reduction in ("mean", "sum", "none"):
            mine.grad = logits.grad = None
            ours = parallel_cross_entropy(mine, targets, reduction=reduction)
            theirs = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
            (ours * 2).sum().backward()
            (theirs * 2).sum().backward()
            own = logits.grad.chunk(world.world_size(), -1)[world.rank()]
            gaps += [float((ours.flatten() - theirs).detach().abs().max()), float((mine.grad - own).abs().max())]
        half = parallel_cross_entropy(mine.detach().bfloat16(), targets)
        reported = []
        for bad in (targets + 12, targets[0], targets.double()):
            with pytest.raises(TensorError) as caught:
                parallel_cross_entropy(mine, bad)
            reported.append(str(caught.value))
        return max(gaps), half.dtype, reported

    for gap, dtype, reported in world.run(work):
        assert gap < 1e-12
        assert dtype is torch.float32
        assert "targets must be 0 to 11" in reported[0]
        assert "plus one dimension for this rank's part" in reported[1]
        assert "targets must be integers" in reported[2]
