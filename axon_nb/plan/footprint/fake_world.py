"""The simulator's private torch hooks: a fake process group, fake tensors, and who allocates a buffer.

Written against torch 2.13.0, and torch.distributed 2.11.0 and 2.12.0. The register lists the hooks as
`plan.simulation`; if a torch lacks one, nothing is simulated, and closed-form plans still work.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from axon_nb.plan.errors import PlanError
from axon_nb.plan.tracing.fake_tensors import as_with_data, lazy_chunks, patched_apply, skip_init
from axon_nb.records.hooks import missing_hooks

_DISTRIBUTED = Path(torch.__file__).parent / "distributed"
_FSDP = _DISTRIBUTED / "fsdp" / "_fully_shard"
NOWHERE = "nowhere"
"""Real runs allocate these without data too: torch asks an operation for its result's shape."""
_MAKERS: dict[tuple[Path, str], str] = {
    (_FSDP / "_fsdp_collectives.py", ""): "communication",
    (_FSDP / "_fsdp_param.py", ""): "unsharded",
    (_DISTRIBUTED / "_functional_collectives.py", ""): "communication",
    (_DISTRIBUTED / "tensor" / "_redistribute.py", ""): "communication",
    (_DISTRIBUTED / "tensor" / "_collective_utils.py", ""): "communication",
    (_DISTRIBUTED / "tensor" / "_sharding_prop.py", ""): NOWHERE,
    (_DISTRIBUTED / "tensor" / "_decompositions.py", ""): NOWHERE,
    (_DISTRIBUTED / "pipelining" / "_utils.py", "_make_tensor_from_meta"): "communication",
    (_DISTRIBUTED / "pipelining" / "stage.py", "_make_tensor_from_meta"): "communication",
}
ORIGINS = {(str(path), name): role for (path, name), role in _MAKERS.items()}
"""A storage's role by the file, and where needed the function, that allocates it."""

SAME = frozenset({"_c10d_functional::wait_tensor", "c10d_functional::wait_tensor"})
"""Operations that return their input; on fake tensors torch makes a new one (2.13)."""

RESULT = -1
GLOO_COPIES = {
    "c10d::_allgather_base_": 0,
    "c10d::allgather_": 0,
    "c10d::allgather_into_tensor_coalesced_": 0,
    "c10d::_reduce_scatter_base_": 1,
    "c10d::reduce_scatter_": 1,
    "c10d::reduce_scatter_tensor_coalesced_": 1,
    "_c10d_functional::all_gather_into_tensor": RESULT,
    "_c10d_functional::reduce_scatter_tensor": 0,
}
"""What Gloo copies during a collective: an argument by its index, or the result; from its allocations (2.13)."""

WHOLE_GRADIENTS = frozenset({"fsdp::chunk_cat", "aten::_chunk_cat"})
"""The operation with which FSDP copies a unit's unsharded gradients: its first argument."""

NO_VALUES: tuple[type[Exception], ...] = tuple(
    getattr(fake_tensor, name)
    for name in ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException")
    if hasattr(fake_tensor, name)
)
"""What fake tensors raise when a value would be needed."""

_UNCACHED_MODULES = tuple(
    f"torch.distributed.tensor.{name}" for name in ("_dispatch", "_redistribute", "_sharding_prop")
)
_TRACING = "_are_we_tracing"
_FAKE_GROUP = "torch.testing._internal.distributed.fake_pg"


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Inside, this process is one rank of a world without other ranks: collectives do nothing.

    Raises:
        PlanError: this torch lacks a hook.
    """
    if missing := missing_hooks("plan.simulation"):
        raise PlanError(
            f"The simulator needs {', '.join(missing)}, which torch {torch.__version__} lacks: use "
            "method='closed_form'."
        )
    store: Any = importlib.import_module(_FAKE_GROUP).FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(axes: dict[str, int]) -> DeviceMesh:
    """Make a mesh of the world's ranks; outside `fake_tensors`, because it holds rank numbers."""
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Inside, tensors have no data, except those of meshes, whose values are needed."""
    made = DeviceMesh.__init__

    def real(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        with fake_tensor.unset_fake_temporarily():
            made(self, *args, **kwargs)

    DeviceMesh.__init__ = real  # type: ignore[method-assign]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, _skip_needless_work():
            yield mode
    finally:
        DeviceMesh.__init__ = made  # type: ignore[method-assign]


@contextlib.contextmanager
def _skip_needless_work() -> Iterator[None]:
    """Inside, torch skips work that takes time and changes no size, and nothing else differs from a real step."""
    with patched_apply(), skip_init(), lazy_chunks(), _dtensor_caches(), as_with_data():
        yield


@contextlib.contextmanager
def _dtensor_caches() -> Iterator[None]:
    """Inside, DTensor uses its sharding caches, which it bypasses for fake tensors."""
    caches = [
        vars(module) for name in _UNCACHED_MODULES if (module := sys.modules.get(name)) and _TRACING in vars(module)
    ]
    kept = [names[_TRACING] for names in caches]
    for names in caches:
        names[_TRACING] = lambda: False
    try:
        yield
    finally:
        for names, before in zip(caches, kept, strict=True):
            names[_TRACING] = before
