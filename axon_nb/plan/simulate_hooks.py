"""What is private of torch in the simulator: a group that sends nothing, fake tensors, who makes a buffer.

Read from the sources of torch 2.13.0, and of torch.distributed 2.11.0 and 2.12.0. `missing()` names what a torch does
not have; nothing is simulated then, and plans by formula remain.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
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
from axon_nb.plan.simulate_chunks import lazy_chunks
from axon_nb.plan.simulate_convert import patched_apply
from axon_nb.plan.simulate_init import skip_init

__all__ = [
    "GLOO_COPIES",
    "NOWHERE",
    "NO_VALUES",
    "ORIGINS",
    "RESULT",
    "SAME",
    "WHOLE_GRADIENTS",
    "fake_world",
    "fakes",
    "mesh_of",
    "missing",
]

_DISTRIBUTED = Path(torch.__file__).parent / "distributed"
_FSDP = _DISTRIBUTED / "fsdp" / "_fully_shard"
NOWHERE = "nowhere"
"""What is made without data in real runs, too: torch asks an operation for the shape of its result."""
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
"""What a storage is, by the file, and where that says too little the function, that has it made."""

SAME = frozenset({"_c10d_functional::wait_tensor", "c10d_functional::wait_tensor"})
"""Operations that give back the tensor they are given; on fake tensors torch makes another one (2.13)."""

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
"""What Gloo copies while a collective runs: an argument by its number, or the result; by its allocations (2.13)."""

WHOLE_GRADIENTS = frozenset({"fsdp::chunk_cat", "aten::_chunk_cat"})
"""The operation that FSDP copies the gradients of a unit's whole parameters with: its first argument."""

NO_VALUES: tuple[type[Exception], ...] = tuple(
    getattr(fake_tensor, name)
    for name in ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException")
    if hasattr(fake_tensor, name)
)
"""What fake tensors raise where a value would be needed."""

_FORGETFUL = tuple(f"torch.distributed.tensor.{name}" for name in ("_dispatch", "_redistribute", "_sharding_prop"))
_TRACING = "_are_we_tracing"
_FAKE_GROUP = "torch.testing._internal.distributed.fake_pg"


def missing() -> list[str]:
    """Names of what this torch does not have."""
    lost = [f"distributed/fsdp/_fully_shard/{name}.py" for name in ("_fsdp_collectives", "_fsdp_param")]
    lost = [name for name in lost if not (_DISTRIBUTED.parent / name).exists()]
    lost += [] if importlib.util.find_spec(_FAKE_GROUP) else [_FAKE_GROUP]
    lost += [] if len(NO_VALUES) == 3 else ["torch._subclasses.fake_tensor exceptions"]
    return lost + ([] if hasattr(torch.UntypedStorage, "_cdata") else ["UntypedStorage._cdata"])


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Within it this process is one rank of a world whose other ranks do not exist: collectives do nothing.

    Raises:
        PlanError: this torch has not what it takes.
    """
    if lost := missing():
        raise PlanError(
            f"the simulator needs {', '.join(lost)}, which torch {torch.__version__} does not have: "
            "method='closed_form' works without."
        )
    store: Any = importlib.import_module(_FAKE_GROUP).FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(axes: dict[str, int]) -> DeviceMesh:
    """A mesh of the world's ranks; before there are fake tensors, for it holds the numbers of ranks."""
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


@contextlib.contextmanager
def fakes() -> Iterator[FakeTensorMode]:
    """Within it tensors have no data; meshes, whose numbers are needed, have."""
    made = DeviceMesh.__init__

    def real(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        with fake_tensor.unset_fake_temporarily():
            made(self, *args, **kwargs)

    DeviceMesh.__init__ = real  # type: ignore[method-assign]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, _lighter():
            yield mode
    finally:
        DeviceMesh.__init__ = made  # type: ignore[method-assign]


@contextlib.contextmanager
def _lighter() -> Iterator[None]:
    """Within it is left out what takes time and changes no size."""
    with patched_apply(), skip_init(), lazy_chunks(), _remembering():
        yield


@contextlib.contextmanager
def _remembering() -> Iterator[None]:
    """Within it DTensor remembers what it has found out about operations; else it does not where tensors are fakes."""
    found = [vars(module) for name in _FORGETFUL if (module := sys.modules.get(name)) and _TRACING in vars(module)]
    kept = [names[_TRACING] for names in found]
    for names in found:
        names[_TRACING] = lambda: False
    try:
        yield
    finally:
        for names, before in zip(found, kept, strict=True):
            names[_TRACING] = before
