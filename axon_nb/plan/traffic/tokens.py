"""What tokens send in a step: to their experts and back, and their keys and values around a ring.

Lepikhin et al., GShard (2020), for experts; Liu et al., Ring Attention with Blockwise Transformers (2023).
"""

from __future__ import annotations

from collections.abc import Iterator

from axon_nb.errors import UsageError
from axon_nb.plan.traffic.layout import ParallelLayout
from axon_nb.plan.traffic.plan import Traffic, grouped


def expert_traffic(layout: ParallelLayout) -> Iterator[Traffic]:
    """Yield what ranks along ``ep`` send each other: tokens to their experts and back, and before that how many."""
    parts, positions = layout.parts, layout.size("cp")
    by_rank: dict[int, tuple[list[int], list[int]]] = {}
    for name, count in layout.experts.items():
        tokens, *others = layout.trace.inputs[name]
        top_k = next((fact.shape[-1] for fact in others if not fact.dtype.is_floating_point), 1)
        counts, visits = by_rank.setdefault(layout.pp_rank_of(name), ([], []))
        counts += [8 * count] * parts
        visits += [tokens.nbytes * top_k // parts // positions] * (2 * parts)
    for pp_rank, (counts, visits) in by_rank.items():
        for phase, what, sizes in (
            ("forward", "numbers of tokens", counts),
            ("forward", "tokens to experts and back", visits),
            ("backward", "gradients of tokens", visits),
        ):
            yield Traffic("ep", layout.size("ep"), "all_to_all", phase, what, grouped(sizes), pp_rank=pp_rank)


def ring_traffic(layout: ParallelLayout) -> Iterator[Traffic]:
    """Yield what `ContextParallel` sends: keys and values to the next rank, in backward also their gradients.

    Raises:
        UsageError: the model has no attention that can be split.
    """
    trace, parts, num_ranks = layout.trace, layout.parts, layout.size("cp")
    if not trace.attention:
        raise UsageError(
            f"cp splits the sequence of scaled_dot_product_attention, which {type(trace.model).__name__} does not "
            "call: leave cp out."
        )
    by_rank: dict[int, list[tuple[int, int]]] = {}
    for name, pairs in trace.attention.items():
        tp = layout.size("tp") if layout.divides_part(name) else 1
        by_rank.setdefault(layout.pp_rank_of(name), []).extend((size // tp, width) for size, width in pairs)
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
