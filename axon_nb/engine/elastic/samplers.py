"""Samplers that split a dataset over all ranks: their place among another number of ranks."""

from __future__ import annotations

import math
from typing import Any

from axon_nb.engine.live_objects import live_objects

_SAMPLER = ("torch.utils.data.distributed", "DistributedSampler")


def resize_samplers(old_size: int, *, rank: int, size: int) -> int:
    """Have every sampler over all `old_size` ranks split its dataset over `size`; return how many there are.

    An iteration that has begun keeps its samples. axon_nb's `ResumableSampler` continues after the samples that all
    ranks have seen.

    Args:
        old_size: Number of ranks before.
        rank: This rank.
        size: Number of ranks now.
    """
    (samplers,) = live_objects(_SAMPLER)
    chosen = [sampler for sampler in samplers if getattr(sampler, "num_replicas", None) == old_size]
    for sampler in chosen:
        _resize(sampler, rank, size)
    return len(chosen)


def _resize(sampler: Any, rank: int, size: int) -> None:
    # As torch's constructor calculates it.
    sampler.rank, sampler.num_replicas = rank, size
    length = len(sampler.dataset)
    rest = sampler.drop_last and length % size != 0
    sampler.num_samples = math.ceil((length - size) / size) if rest else math.ceil(length / size)
    sampler.total_size = sampler.num_samples * size
