"""Communication between ranks. Works in notebook cells, under torchrun and in plain scripts.

Collectives accept torch tensors, NumPy and CuPy arrays; `all_to_all` has a gradient. `group=None` is the default group;
`async_op=True` returns a `Handle`. `rank`, `world_size` and `is_main_process` are importable but not in `__all__`: in
cells, the first two are numbers. Each name is imported on first use: a rank starts without most of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axon_nb.lazy import lazy_names

if TYPE_CHECKING:
    from axon_nb.comm.collectives.arguments import checking
    from axon_nb.comm.collectives.movement import (
        all_gather,
        all_to_all,
        barrier,
        broadcast,
        broadcast_from,
        gather_tensor,
        recv,
        scatter_tensor,
        send,
    )
    from axon_nb.comm.collectives.reduction import (
        all_reduce,
        all_reduce_max,
        all_reduce_mean,
        all_reduce_min,
        all_reduce_product,
        all_reduce_sum,
        reduce_scatter,
        reduce_scatter_mean,
        reduce_scatter_sum,
    )
    from axon_nb.comm.errors import (
        CollectiveMismatchError,
        CommError,
        DeadlockError,
        InvalidArgumentError,
        InvalidRankError,
        NcclError,
        NotInGroupError,
        TensorError,
        TensorMismatchError,
        WorldClosedError,
    )
    from axon_nb.comm.gradients import (
        GradientBucket,
        GradientSynchronizer,
        GradSyncStrategy,
        sync_gradient,
        sync_gradients,
    )
    from axon_nb.comm.group import Backend, Handle, ProcessGroup, ReduceOp
    from axon_nb.comm.mock import MockBackend
    from axon_nb.comm.mock_world import MockWorld
    from axon_nb.comm.world import World, is_main_process, rank, world_size  # noqa: F401 - see the docstring

__all__ = [
    "Backend",
    "CollectiveMismatchError",
    "CommError",
    "DeadlockError",
    "GradSyncStrategy",
    "GradientBucket",
    "GradientSynchronizer",
    "Handle",
    "InvalidArgumentError",
    "InvalidRankError",
    "MockBackend",
    "MockWorld",
    "NcclError",
    "NotInGroupError",
    "ProcessGroup",
    "ReduceOp",
    "TensorError",
    "TensorMismatchError",
    "World",
    "WorldClosedError",
    "all_gather",
    "all_reduce",
    "all_reduce_max",
    "all_reduce_mean",
    "all_reduce_min",
    "all_reduce_product",
    "all_reduce_sum",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_from",
    "checking",
    "gather_tensor",
    "recv",
    "reduce_scatter",
    "reduce_scatter_mean",
    "reduce_scatter_sum",
    "scatter_tensor",
    "send",
    "sync_gradient",
    "sync_gradients",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "collectives.arguments": "checking",
        "collectives.movement": "all_to_all all_gather barrier broadcast broadcast_from gather_tensor recv "
        "scatter_tensor send",
        "collectives.reduction": "all_reduce all_reduce_max all_reduce_mean all_reduce_min all_reduce_product "
        "all_reduce_sum reduce_scatter reduce_scatter_mean reduce_scatter_sum",
        "errors": "CollectiveMismatchError CommError DeadlockError InvalidArgumentError InvalidRankError NcclError "
        "NotInGroupError TensorError TensorMismatchError WorldClosedError",
        "gradients": "GradSyncStrategy GradientBucket GradientSynchronizer sync_gradient sync_gradients",
        "group": "Backend Handle ProcessGroup ReduceOp",
        "mock": "MockBackend",
        "mock_world": "MockWorld",
        "world": "World is_main_process rank world_size",
    },
)
