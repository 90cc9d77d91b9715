"""Tensor-parallel layers equal the full layer in one process: outputs and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from axon_nb.comm import TensorError, World
from axon_nb.comm.collectives.movement import all_gather
from axon_nb.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelAttention,
    TensorParallelBlock,
    axis_group,
    make_mesh,
)
from axon_nb.parallel.tensor import gather_sequence, split_sequence

SHAPES = [(12,), (5, 12), (2, 3, 12)]
F64: dict[str, Any] = {"dtype": torch.float64}


def _layer(bias: bool = True) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Linear(12, 24, bias=bias, **F64)


def _input(shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator, **F64).requires_grad_()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["column, gathered", "column then row", "row of the whole input"])
def test_outputs_and_gradients_equal_those_of_the_full_layer(
    world: Any, kind: str, shape: tuple[int, ...], bias: bool
) -> None:
    def reference(x: torch.Tensor) -> tuple[torch.Tensor, nn.Module]:
        first, second = _layer(bias), nn.Linear(24, 12, **F64)
        second.load_state_dict({"weight": first.weight.detach().T.contiguous(), "bias": torch.arange(12.0, **F64)})
        if kind == "column then row":
            return second(torch.tanh(first(x))), nn.ModuleList([first, second])
        return first(x), nn.ModuleList([first, second])

    def work(world: World) -> Any:
        x = _input(shape)
        whole: Any = reference(x.detach())[1]
        first, second = whole
        if kind == "column, gathered":
            layers: list[Any] = [ColumnParallelLinear.from_linear(first, gather_output=True)]
            out = layers[0](x)
        elif kind == "column then row":
            layers = [ColumnParallelLinear.from_linear(first), RowParallelLinear.from_linear(second)]
            out = layers[1](torch.tanh(layers[0](x)))
        else:
            layers = [RowParallelLinear.from_linear(first, input_is_parallel=False)]
            out = layers[0](x)
        (out * torch.arange(out.shape[-1], **F64)).sum().backward()
        gradients = []
        for layer in layers:
            dim = 0 if isinstance(layer, ColumnParallelLinear) else 1
            gradients.append(all_gather(layer.weight.grad, dim=dim))
            if layer.bias is not None:
                gradients.append(all_gather(layer.bias.grad) if dim == 0 else layer.bias.grad)
        return out.detach(), x.grad, gradients

    x = _input(shape)
    out, whole = reference(x)
    (out * torch.arange(out.shape[-1], **F64)).sum().backward()
    expected = [p.grad for p in whole.parameters() if p.grad is not None]
    for out_there, x_gradient, gradients in world.run(work):
        torch.testing.assert_close(out_there, out.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(x_gradient, x.grad, rtol=1e-12, atol=1e-12)
        assert len(gradients) == len(expected)
        for gradient, reference_gradient in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, reference_gradient, rtol=1e-12, atol=1e-12)


def test_shards_come_from_one_initialisation(two: Any) -> None:
    def work(world: World) -> Any:
        torch.manual_seed(7)  # the same seed on every rank must not give the same part
        column = ColumnParallelLinear(4, 6)
        row: Any = RowParallelLinear(6, 4)
        return column.weight.detach(), row.weight.detach(), row.bias.detach(), repr(column)

    (first, row, bias, shown), (second, row_too, bias_too, _) = two.run(work)
    assert first.shape == second.shape == (3, 4)
    assert not torch.equal(first, second)
    assert not torch.equal(row, row_too)
    assert torch.equal(bias, bias_too)
    assert shown == "ColumnParallelLinear(in_features=4, out_features=3 of 6, bias=True)"


@pytest.mark.parametrize(("causal", "sequence"), [(False, False), (True, False), (True, True)])
def test_attention_and_block_train_as_in_one_process(four: Any, causal: bool, sequence: bool) -> None:
    def train(model: nn.Module, pg: Any = None) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x = _input((2, 8, 16)).detach()
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            cut = sequence and pg
            out = gather_sequence(model(split_sequence(x, pg)), pg, replicated=True) if cut else model(x)
            loss = (out - x.flip(0)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def build(group: Any) -> nn.Module:
        torch.manual_seed(3)
        return TensorParallelBlock(16, 4, causal=causal, sequence=sequence, group=group, **F64)

    def work(world: World) -> list[float]:
        return train(build(None), world.default_group() if world.world_size() > 1 else None)

    (alone,) = World.mock(1).run(work)
    for losses in four.run(work):
        assert losses == pytest.approx(alone, rel=1e-10)
    assert alone[-1] < alone[0]


def test_tensor_parallelism_in_a_mesh_axis(four: Any) -> None:
    def work(world: World) -> Any:
        mesh = make_mesh(dp=2, tp=2, device="cpu")
        layer = ColumnParallelLinear.from_linear(_layer(), gather_output=True, group=axis_group(mesh, "tp"))
        return layer(_input((12,))).detach(), layer.weight.shape[0]

    for out, rows in four.run(work):
        torch.testing.assert_close(out, _layer()(_input((12,))).detach(), rtol=1e-12, atol=1e-12)
        assert rows == 12


def test_features_are_never_dropped() -> None:
    def work(world: World) -> list[str]:
        reported = []
        for build in (
            lambda: ColumnParallelLinear(4, 7),
            lambda: RowParallelLinear(7, 4),
            lambda: TensorParallelAttention(12, 3),
            lambda: TensorParallelAttention(10, 4),
        ):
            try:
                build()
            except TensorError as error:
                reported.append(str(error))
        return reported

    for reported in World.mock(2).run(work):
        assert reported == [
            "out_features must be divisible by the group size (2); got 7. The next multiple is 8.",
            "in_features must be divisible by the group size (2); got 7. The next multiple is 8.",
            "heads must be divisible by the group size (2); got 3.",
            "hidden must be divisible by heads (4); got 10.",
        ]
