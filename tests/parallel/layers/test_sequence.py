"""Attention over a sequence that is split over ranks equals that over the whole one: outputs and gradients."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from axon_nb.comm import InvalidArgumentError, TensorError, World
from axon_nb.parallel import DDP, ContextParallel, sequence
from axon_nb.parallel.models import GPT, GPTConfig

BATCH, HEADS, SIZE = 2, 4, 8
LAYOUTS = [
    {"exchange": "ring"},
    {"exchange": "ring", "balanced": False},
    {"exchange": "all_to_all"},
    {"exchange": "all_to_all", "balanced": False},
]


def _heads(length: int, number: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(
        BATCH, number, length, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def _documents(length: int) -> torch.Tensor:
    """Documents of five positions in the first sample, of seven in the second."""
    return torch.stack([torch.arange(length) // 5, torch.arange(length) // 7])


def _naming(what: Any) -> Any:
    return lambda message: f"{what}: {message}"


def _whole(length: int, key_heads: int, causal: bool, packed: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    inputs = [_heads(length, HEADS if seed == 0 else key_heads, seed, dtype).requires_grad_() for seed in range(3)]
    seen = torch.ones(length, length, dtype=torch.bool)
    if causal:
        seen = seen.tril()
    if packed:
        numbers = _documents(length)
        seen = (seen & (numbers[:, :, None] == numbers[:, None]))[:, None]
    out = functional.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], attn_mask=seen, enable_gqa=True)
    (out * _heads(length, HEADS, 3, dtype)).sum().backward()
    return [out.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]


def _on_rank(
    world: World, cases: list[tuple[int, int, bool, bool, dict[str, Any]]], dtype: torch.dtype
) -> list[list[torch.Tensor]]:
    found = []
    for length, key_heads, causal, packed, layout in cases:
        context = ContextParallel(length, documents=_documents(length) if packed else None, **layout)
        parts = [
            context.split(_heads(length, HEADS if seed == 0 else key_heads, seed, dtype), -2).requires_grad_()
            for seed in range(3)
        ]
        out = context.attention(*parts, causal=causal)
        (out * context.split(_heads(length, HEADS, 3, dtype), -2)).sum().backward()
        found.append([context.gather(tensor, -2) for tensor in (out.detach(), *(part.grad for part in parts))])
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.05)], ids=str)
def test_outputs_and_gradients_equal_those_of_the_whole_sequence(
    world: Any, dtype: torch.dtype, tolerance: float
) -> None:
    # 19 positions: no two parts are equal. Two heads of keys: four ranks share them in the ring only.
    cases = [
        (length, key_heads, causal, packed, layout)
        for layout in LAYOUTS
        for length in (24, 19)
        for key_heads in (4, 2)
        for causal in (True, False)
        for packed in (False, True)
    ]
    size = len(world.run(lambda world: world.rank()))
    cases = [case for case in cases if case[4]["exchange"] == "ring" or not (case[1] % size or HEADS % size)]
    expected = [_whole(*case[:4], dtype) for case in cases]
    for results in world.run(_on_rank, cases, dtype):
        for case, found, tensors in zip(cases, results, expected, strict=True):
            for got, tensor in zip(found, tensors, strict=True):
                assert got.dtype is dtype
                torch.testing.assert_close(got, tensor, rtol=tolerance, atol=tolerance, msg=_naming(case))


def test_plain_operations_compute_the_same_as_the_fused_kernel(gloo: Any) -> None:
    case = (19, 2, True, True, {"exchange": "ring"})

    def work(world: World) -> Any:
        fused = _on_rank(world, [case], torch.float64)
        with mock.patch.object(sequence, "_is_fused", return_value=False):  # as on a GPU
            return fused, _on_rank(world, [case], torch.float64)

    for fused, plain in gloo(2).run(work):
        for first, second in zip(fused[0], plain[0], strict=True):
            torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


def test_a_model_trains_in_a_block_as_on_the_whole_sequence(four: Any) -> None:
    config = GPTConfig(context=40, hidden=16, heads=4, blocks=2)

    def model() -> GPT:
        torch.manual_seed(0)
        return GPT(config).double()

    tokens = torch.randint(256, (2, 38), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")

    def work(world: World) -> Any:
        own = model()
        trained = DDP(own)
        with ContextParallel(inputs.shape[1]) as context:
            # Positions are numbered in the whole sequence, so it is embedded as a whole.
            own[0].register_forward_hook(lambda module, args, out: context.split(out))
            context.mean(loss_of(trained(inputs), context.split(targets))).backward()
        return [parameter.grad for parameter in own.parameters()]

    whole = model()
    loss_of(whole(inputs), targets).mean().backward()
    for gradients in four.run(work):
        for (name, parameter), gradient in zip(whole.named_parameters(), gradients, strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-12, msg=_naming(name))


def test_what_cannot_be_split_is_refused(two: Any) -> None:
    def work(world: World) -> None:
        with pytest.raises(InvalidArgumentError, match="at least 4 positions for 2 ranks"):
            ContextParallel(3)
        with pytest.raises(InvalidArgumentError, match="one of ring, all_to_all"):
            ContextParallel(8, exchange="tree")
        with pytest.raises(TensorError, match=r"shape \(8,\) or \(batch, 8\)"):
            ContextParallel(8, documents=torch.zeros(7))
        context = ContextParallel(8, exchange="all_to_all")
        whole, part, three = torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 4, 4), torch.zeros(1, 3, 4, 4)
        with pytest.raises(TensorError, match="this rank's 4 of 8 positions; got 8"):
            context.attention(whole, whole, whole)
        with pytest.raises(TensorError, match=r"divisible by the 2 ranks.*Use exchange='ring'"):
            context.attention(three, three, three)
        with context, pytest.raises(InvalidArgumentError, match="takes no mask: pass `documents`"):
            functional.scaled_dot_product_attention(part, part, part, attn_mask=torch.ones(4, 4, dtype=torch.bool))
        with context, pytest.raises(InvalidArgumentError, match="takes no dropout"):
            functional.scaled_dot_product_attention(part, part, part, dropout_p=0.5)

    two.run(work)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_model_of_transformers_needs_no_change_under_fsdp2(gloo: Any, batch: int) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(50, (batch, 38), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )

    def model() -> Any:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).double()

    def work(world: World) -> Any:
        own = model()
        for layer in own.model.layers:
            fully_shard(layer)
        fully_shard(own)
        with ContextParallel(inputs.shape[1]) as context:
            logits = own(context.split(inputs), position_ids=context.positions()[None]).logits
            losses = functional.cross_entropy(logits.transpose(1, 2), context.split(targets), reduction="none")
            context.mean(losses).backward()
        return [parameter.grad.full_tensor() for parameter in own.parameters()]

    whole = model()
    functional.cross_entropy(whole(inputs).logits.transpose(1, 2), targets).backward()
    for gradients in gloo(2).run(work):
        for (name, parameter), gradient in zip(whole.named_parameters(), gradients, strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-12, msg=_naming(name))
