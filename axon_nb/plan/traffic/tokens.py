"""What tokens send in a step: to their experts and back, and their keys and values around a ring.

Lepikhin et al., GShard (2020), for experts; Liu et al., Ring Attention with Blockwise Transformers (2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from axon_nb.errors import UsageError
from axon_nb.plan.tracing.trace import ModelTrace
from axon_nb.plan.traffic.parallelism import StageAssignment
from axon_nb.plan.traffic.plan import Traffic, grouped


def expert_traffic(
    trace: ModelTrace,
    experts: Mapping[str, int],
    *,
    num_ranks: int,
    parts: int,
    positions: int,
    stages: StageAssignment | None,
) -> Iterator[Traffic]:
    """Yield what ranks along ``ep`` send each other: tokens to their experts and back, and before that how many.

    Args:
        trace: The whole model's trace with one rank's batch.
        experts: Number of experts by module.
        num_ranks: Along ``ep``.
        parts: Number of microbatches.
        positions: Ranks along ``cp``, each with its part of the sequence.
        stages: How the model is split over ``pp``; None: it is not.
    """
    by_rank: dict[int, tuple[list[int], list[int]]] = {}
    for name, count in experts.items():
        tokens, *others = trace.inputs[name]
        top_k = next((fact.shape[-1] for fact in others if not fact.dtype.is_floating_point), 1)
        counts, visits = by_rank.setdefault(0 if stages is None else stages.rank_of(name), ([], []))
        counts += [8 * count] * parts
        visits += [tokens.nbytes * top_k // parts // positions] * (2 * parts)
    for pp_rank, (counts, visits) in by_rank.items():
        for phase, what, sizes in (
            ("forward", "numbers of tokens", counts),
            ("forward", "tokens to experts and back", visits),
            ("backward", "gradients of tokens", visits),
        ):
            yield Traffic("ep", num_ranks, "all_to_all", phase, what, grouped(sizes), pp_rank=pp_rank)


def ring_traffic(
    trace: ModelTrace, *, num_ranks: int, parts: int, stages: StageAssignment | None, shares: Mapping[str, int]
) -> Iterator[Traffic]:
    """Yield what `ContextParallel` sends: keys and values to the next rank, in backward also their gradients.

    Args:
        trace: The whole model's trace with one rank's batch.
        num_ranks: Along ``cp``.
        parts: Number of microbatches.
        stages: How the model is split over ``pp``; None: it is not.
        shares: Modules whose heads are sharded over this many ``tp`` ranks.

    Raises:
        UsageError: the model has no attention that can be split.
    """
    if not trace.attention:
        raise UsageError(
            f"cp splits the sequence of scaled_dot_product_attention, which {type(trace.model).__name__} does not "
            "call: leave cp out."
        )
    by_rank: dict[int, list[tuple[int, int]]] = {}
    for name, pairs in trace.attention.items():
        pp_rank = 0 if stages is None else stages.rank_of(name)
        by_rank.setdefault(pp_rank, []).extend((size // shares.get(name, 1), width) for size, width in pairs)
    for pp_rank, pairs in by_rank.items():
        sizes = [size // parts // num_ranks for size, _ in pairs]
        wide = [size * max(4, itemsize) // itemsize for size, (_, itemsize) in zip(sizes, pairs, strict=True)]
        for phase, what, each, times in (
            ("forward", "keys and values", sizes, num_ranks - 1),
            ("backward", "keys and values", sizes, num_ranks - 1),
            ("backward", "gradients of keys and values", wide, num_ranks),
        ):
            messages = grouped(each * (times * parts))
            overlaps = "" if each is wide else phase
            for operation in ("send", "recv"):
                yield Traffic("cp", num_ranks, operation, phase, what, messages, overlaps, pp_rank)
