"""A layer of experts over ranks equals the same layer on one rank: outputs, gradients, loads and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from axon_nb.comm import InvalidArgumentError, TensorError, World, all_gather, all_reduce_mean, sync_gradients
from axon_nb.parallel import (
    DDP,
    Checkpoints,
    Experts,
    accumulating,
    clip_grad_norm,
    expert_load,
    make_mesh,
    parallelize,
)

TOKENS, HIDDEN = 24, 8
CUTS = {1: [0, 24], 2: [0, 7, 24], 3: [0, 7, 7, 24], 4: [0, 5, 5, 20, 24]}
"""Tokens of each rank; one has none."""


def _layer(**options: Any) -> Experts:
    return Experts(HIDDEN, 16, 12, seed=5, dtype=torch.float64, **options)


def _tokens() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _step(world: World, **options: Any) -> tuple[torch.Tensor, ...]:
    size, rank = world.world_size(), world.rank()
    layer = _layer(**options)
    own = _tokens()[CUTS[size][rank] : CUTS[size][rank + 1]].requires_grad_()
    out = layer(own)
    # The mean over ranks of these is the mean over all tokens.
    ((out**2).sum() * size / TOKENS).backward()
    all_reduce_mean(layer.router.weight.grad)
    norm = clip_grad_norm(layer, 1e9)
    whole = [all_gather(parameter.grad) for parameter in layer.expert_parameters()]
    assert own.grad is not None
    load = all_gather(layer.load[None]).sum(0)
    rows = [all_gather(rows, uneven=True) for rows in (out.detach(), own.grad / size)]
    return (*rows, layer.router.weight.grad, *whole, load, torch.tensor(norm))


@pytest.mark.parametrize("options", [{}, {"top_k": 1}, {"top_k": 3, "balance": "bias"}], ids=str)
def test_any_number_of_ranks_computes_what_one_rank_does(world: Any, options: dict[str, Any]) -> None:
    expected = World.mock(1).run(lambda world: _step(world, **options))[0]
    for found in world.run(lambda world: _step(world, **options)):
        for first, second in zip(found, expected, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-14)


def test_full_experts_drop_and_count_the_tokens_that_come_last(two: Any) -> None:
    def work(world: World) -> Any:
        layer = _layer(top_k=1, capacity=0.5)
        own = _tokens()[world.rank() * 12 :][:12]
        out = layer(own)
        # Half of an even share of 12 tokens over 12 experts: one each.
        kept = (out.abs().sum(-1) > 0).sum()
        load = expert_load(nn.Sequential(layer))
        return int(kept), layer.load.tolist(), layer.dropped, load

    for rank, (kept, load, dropped, table) in enumerate(two.run(work)):
        assert sum(load) == 12
        assert kept == 12 - dropped == sum(min(1, tokens) for tokens in load)
        assert table.tokens[0, rank].tolist() == load
        assert int(table.dropped[0, rank]) == dropped
        assert table.imbalance["0"] == pytest.approx(int(table.tokens.sum(1).max()) / 2)
        assert f"{int(table.dropped.sum())} (" in repr(table)
        assert "on rank 1" in table._repr_html_()
        assert table.to_frame().to_numpy().sum() == 24


def test_balance_evens_out_the_load(two: Any) -> None:
    def work(world: World) -> Any:
        own = _tokens()[world.rank() * 12 :][:12] + 1.0  # tokens that are alike want the same experts
        biased = _layer(balance="bias")
        ratios = []
        for _ in range(60):
            biased(own)
            ratios.append(expert_load(biased).imbalance["experts"])
            biased.update_bias(0.01)
        trained = _layer(balance="loss")
        optimizer, losses = torch.optim.SGD(trained.parameters(), lr=0.1), []
        for _ in range(30):
            trained(own)
            loss = trained.balance_loss
            assert loss is not None
            losses.append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return ratios[0], min(ratios[-10:]), losses[0], losses[-1]

    for before, after, first, last in two.run(work):
        assert after < before
        assert last < first


@pytest.mark.parametrize("ddp", [DDP, nn.parallel.DistributedDataParallel])
def test_experts_inside_the_data_axis_train_as_on_one_rank(four: Any, ddp: Callable[..., nn.Module]) -> None:
    def model(**options: Any) -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64), _layer(**options))

    def work(world: World) -> Any:
        mesh = make_mesh(dp=2, ep=2)
        own = model(group=mesh["ep"])
        trained = ddp(own)  # the linear layer and the router, over all four ranks
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            (trained(_tokens()[world.rank() * 6 :][:6]) ** 2).mean().backward()
            sync_gradients(own[1].expert_parameters(), group=mesh["dp"])
            optimizer.step()
        return own[0].weight.detach(), own[1].router.weight.detach(), all_gather(own[1].up.detach(), group=mesh["ep"])

    def alone(world: World) -> Any:
        whole = model()
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            (whole(_tokens()) ** 2).mean().backward()
            optimizer.step()
        return whole[0].weight.detach(), whole[1].router.weight.detach(), whole[1].up.detach()

    expected = World.mock(1).run(alone)[0]
    for found in four.run(work):
        for first, second in zip(found, expected, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-14)


def test_experts_train_beside_sharded_layers_and_with_accumulation(four: Any) -> None:
    def model(**options: Any) -> nn.Module:
        torch.manual_seed(1)
        mlp = nn.Sequential(
            nn.Linear(HIDDEN, 16, dtype=torch.float64), nn.GELU(), nn.Linear(16, HIDDEN, dtype=torch.float64)
        )
        return nn.ModuleDict({"mlp": mlp, "experts": _layer(**options)})

    def output(own: Any, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = own["experts"](own["mlp"](x))
        return made

    def work(world: World) -> Any:
        # Both ranks along tp have the same tokens, and each a half of the hidden features of the MLP.
        mesh = make_mesh(ep=2, tp=2)
        own: Any = model(group=mesh["ep"])
        parallelize(own, {"mlp.0": "column", "mlp.2": "row"}, mesh=mesh["tp"])
        shared = [p for p in own.parameters() if not any(p is one for one in own["experts"].expert_parameters())]
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
        norms = []
        for _ in range(2):
            for step in range(2):
                with accumulating(own, step, 2) as last:
                    tokens = _tokens()[mesh["ep"].get_local_rank() * 12 :][:12][step * 6 :][:6]
                    ((output(own, tokens) ** 2).mean() / 2).backward()
                    if last:
                        sync_gradients(shared, group=mesh["ep"])
                        norms.append(float(clip_grad_norm(own, 0.5)))
                        optimizer.step()
                        optimizer.zero_grad()
        up = own["mlp"][0].weight
        whole = up.full_tensor() if isinstance(up, DTensor) else up
        return (
            torch.tensor(norms),
            whole.detach(),
            own["experts"].router.weight.detach(),
            all_gather(own["experts"].up.detach(), group=mesh["ep"]),
        )

    def alone(world: World) -> Any:
        whole: Any = model()
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
        norms = []
        for _ in range(2):
            optimizer.zero_grad()
            (output(whole, _tokens()) ** 2).mean().backward()
            norms.append(float(nn.utils.clip_grad_norm_(whole.parameters(), 0.5)))
            optimizer.step()
        experts = whole["experts"]
        return torch.tensor(norms), whole["mlp"][0].weight.detach(), experts.router.weight.detach(), experts.up.detach()

    expected = World.mock(1).run(alone)[0]
    for found in four.run(work):
        for first, second in zip(found, expected, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-12)


def test_a_checkpoint_loads_on_another_number_of_ranks(gloo: Any, tmp_path: Path) -> None:
    def save(world: World) -> Any:
        layer = _layer()
        Checkpoints(tmp_path).save(1, model=layer)
        return layer(_tokens()).detach()

    def load(world: World) -> Any:
        layer = Experts(HIDDEN, 16, 12, seed=9, dtype=torch.float64)
        Checkpoints(tmp_path).load_latest(model=layer)
        return layer(_tokens()).detach()

    saved = gloo(4).run(save)[0]
    for out in gloo(2).run(load):
        torch.testing.assert_close(out, saved, rtol=1e-12, atol=1e-14)


def test_what_does_not_fit_is_refused(two: Any) -> None:
    def work(world: World) -> None:
        for options, text in [
            ({"num_experts": 3}, "divisible by the 2 ranks; got 3"),
            ({"top_k": 5}, "top_k must be 1 to 4"),
            ({"capacity": 0}, "capacity must be above 0"),
            ({"balance": "even"}, "balance must be"),
        ]:
            with pytest.raises(InvalidArgumentError, match=text):
                Experts(8, 8, **{"num_experts": 4, **options})
        with pytest.raises(TensorError, match="tokens of 8 features"):
            Experts(8, 8, 4)(torch.zeros(2, 7))
        with pytest.raises(InvalidArgumentError, match="Linear has no Experts"):
            expert_load(nn.Linear(2, 2))

    two.run(work)
