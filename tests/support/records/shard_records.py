"""Shards of tensors, made up: what ranks would report."""

from __future__ import annotations

import itertools

from axon_nb.records.telemetry import Shard


def split(shape: tuple[int, ...], mesh: tuple[int, ...], dims: tuple[int | None, ...], name: str = "w") -> list[Shard]:
    """The parts of a tensor that each axis of a mesh splits along a dim, as `torch.chunk` does, or copies."""
    shards = []
    for rank, place in enumerate(itertools.product(*map(range, mesh))):
        offset, local = [0] * len(shape), list(shape)
        for axis, dim in enumerate(dims):
            if dim is not None:
                chunk = -(-local[dim] // mesh[axis])
                start = min(chunk * place[axis], local[dim])
                offset[dim], local[dim] = offset[dim] + start, min(chunk, local[dim] - start)
        size = 4
        for length in local:
            size *= length
        placements = tuple("Replicate()" if dim is None else f"Shard({dim})" for dim in dims)
        axes = ("dp", "tp", "cp")[: len(mesh)]
        shards.append(
            Shard(
                name, "parameter", rank, shape, tuple(local), tuple(offset), placements, "float32", "cpu", size,
                axes=axes, mesh_shape=mesh, coordinates=place,
            )
        )  # fmt: skip
    return shards
