"""What tensor parallelism sends in a step, by the style of each module.

Shoeybi et al., Megatron-LM (2019), section 3: a block's attention and its MLP each all-reduce the output once in
forward and the input's gradient once in backward. Korthikanti et al. (2022), section 4.2.2: with sequence parallelism
each all-reduce becomes a reduce_scatter on one side and an all_gather on the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from axon_nb.plan.tracing.trace import ModelTrace, TensorFacts
from axon_nb.plan.traffic.data_parallel import LocalTensor
from axon_nb.plan.traffic.pipeline_parallel import StageAssignment
from axon_nb.plan.traffic.plan import Traffic, grouped

SHARDED_DIM = {"column": 0, "column+gather": 0, "row": 1, "split+row": 1}
"""The dimension of a linear layer's weight that a style shards."""
_FORWARD, _BACKWARD = "forward", "backward"
_NORMS = "gradients of norms"


@dataclass(frozen=True, slots=True)
class _Call:
    phase: str
    operation: str
    purpose: str
    size: int


def tensor_parallel_traffic(
    trace: ModelTrace,
    styles: Mapping[str, str],
    *,
    num_ranks: int,
    sequence: bool,
    parallel_loss: bool,
    parts: int = 1,
    stages: StageAssignment | None = None,
    axis: str = "tp",
) -> Iterator[Traffic]:
    """Yield what ranks along the axis send each other.

    Args:
        trace: The whole model's trace with one rank's batch.
        styles: The styles by module name, as `parallelize` takes them.
        num_ranks: Along the axis.
        sequence: Whether activations between blocks are sharded along the sequence.
        parallel_loss: Whether the loss takes logits sharded over the vocabulary.
        parts: Number of microbatches.
        stages: How the model is split over ``pp``; None: it is not.
        axis: Its name.
    """
    calls: dict[tuple[int, str, str, str], list[int]] = {}
    for name, style in styles.items():
        pp_rank = 0 if stages is None else stages.rank_of(name)
        for call in _calls(trace, name, style, styles, sequence=sequence):
            once = call.purpose == _NORMS
            sizes = [call.size] if once else [call.size // parts] * parts
            calls.setdefault((pp_rank, call.phase, call.operation, call.purpose), []).extend(sizes)
    if parallel_loss:
        pp_rank = 0 if stages is None else stages.rank_of("")
        tokens = _tokens(trace)
        for size in (tokens * 4, 2 * tokens * 4):
            key = (pp_rank, _FORWARD, "all_reduce", "loss of sharded logits")
            calls.setdefault(key, []).extend([size // parts] * parts)
    for (pp_rank, phase, operation, purpose), sizes in calls.items():
        yield Traffic(axis, num_ranks, operation, phase, purpose, grouped(sizes), pp_rank=pp_rank)


def _calls(trace: ModelTrace, name: str, style: str, styles: Mapping[str, str], *, sequence: bool) -> Iterator[_Call]:
    input_, output = _first(trace.inputs.get(name, ())), _first(trace.outputs.get(name, ()))
    if input_ is None or output is None:
        return
    module = trace.model.get_submodule(name)
    is_nested = any(styles.get(above) in ("share", "gather") for above in _above(name))
    yield from _of_input(input_, style, is_nested=is_nested, sequence=sequence and not isinstance(module, nn.Embedding))
    if style in ("row", "split+row"):
        yield _Call(_FORWARD, "reduce_scatter" if sequence else "all_reduce", "sum of the output", output.nbytes)
    if style == "column+gather":
        yield _Call(_FORWARD, "all_gather", "features of the output", output.nbytes)
    if (style in ("row", "split+row") and sequence) or (style == "split" and output.requires_grad):
        yield _Call(_BACKWARD, "all_gather", "gradient of the output", output.nbytes)
    if style in ("sequence", "heads"):
        # DTensor keeps them as partial sums and all-reduces them each time that they are read.
        for leaf, parameter in module.named_parameters():
            size = parameter.numel() * parameter.dtype.itemsize
            for _ in range(trace.grad_uses.get(f"{name}.{leaf}", 1)):
                yield _Call("optimizer", "all_reduce", _NORMS, size)


def _of_input(input_: TensorFacts, style: str, *, is_nested: bool, sequence: bool) -> Iterator[_Call]:
    """What a module's input and its gradient send."""
    gathers_input = style in ("column", "column+gather") and not is_nested
    backward = ""
    if style == "gather" or (gathers_input and sequence):
        yield _Call(_FORWARD, "all_gather", "positions of the input", input_.nbytes)
        backward = "reduce_scatter"
    elif style == "share" or gathers_input:
        backward = "all_reduce"
    elif style == "split+row":
        backward = "all_gather"
    if backward and input_.requires_grad:
        yield _Call(_BACKWARD, backward, "gradient of the input", input_.nbytes)


def _above(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _first(facts: tuple[TensorFacts, ...]) -> TensorFacts | None:
    return facts[0] if facts else None


def _tokens(trace: ModelTrace) -> int:
    """Number of tokens: elements of the model's output without its last dimension."""
    logits = trace.outputs[""][0]
    return TensorFacts(logits.shape[:-1], torch.uint8, False).nbytes


def local_parameters(trace: ModelTrace, styles: Mapping[str, str], num_ranks: int) -> list[LocalTensor]:
    """Return each parameter as one rank of the axis holds it.

    Args:
        trace: The whole model's trace.
        styles: The styles by module name.
        num_ranks: Along ``tp``.
    """
    parameters: list[LocalTensor] = trace.cached(
        ("local parameters", num_ranks, tuple(styles.items())), lambda: _local_parameters(trace, styles, num_ranks)
    )
    return parameters


def _local_parameters(trace: ModelTrace, styles: Mapping[str, str], num_ranks: int) -> list[LocalTensor]:
    ready = set(trace.ready) if trace.has_inputs else None
    parameters = []
    for name, parameter in trace.parameters:
        path, _, leaf = name.rpartition(".")
        shape = list(parameter.shape)
        style = styles.get(path, "")
        if num_ranks > 1 and style in SHARDED_DIM:
            dim = _sharded_dim(trace.model.get_submodule(path), style, leaf)
            if dim is not None:
                shape[dim] //= num_ranks
        has_grad = parameter.requires_grad if ready is None else name in ready
        parameters.append(LocalTensor(name, tuple(shape), parameter.dtype, has_grad, parameter.requires_grad))
    return parameters


def _sharded_dim(module: nn.Module, style: str, leaf: str) -> int | None:
    if isinstance(module, nn.Embedding):
        return 1 - SHARDED_DIM[style]
    if leaf == "weight":
        return SHARDED_DIM[style]
    return 0 if SHARDED_DIM[style] == 0 else None
