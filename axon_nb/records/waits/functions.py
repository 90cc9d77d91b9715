"""Functions that communicate: their public names, and advice if only some ranks call one that does so implicitly."""

from __future__ import annotations

from collections.abc import Iterable

_SAVING = "is a collective: call it on every rank, and use `if rank == 0` only for saving."
_ANY = "is a collective: call it on every rank."

COLLECTIVE_FUNCTIONS: dict[str, str] = {
    "async_save": _ANY,
    "clip_grad_norm_": "sums the norms of all shards and is a collective: call it on every rank.",
    "distribute_module": _ANY,
    "distribute_tensor": _ANY,
    "full_tensor": _SAVING,
    "get_model_state_dict": _SAVING,
    "get_optimizer_state_dict": _SAVING,
    "get_state_dict": _SAVING,
    "get_total_norm": "sums the norms of all shards and is a collective: call it on every rank.",
    "init_device_mesh": _ANY,
    "load": _ANY,
    "new_group": (
        "must be called by every rank, including those outside the new group; with `use_local_synchronization=True` "
        "only by its members."
    ),
    "optim_state_dict": _SAVING,
    "redistribute": _ANY,
    "save": "writes every rank's shards and is a collective: call it on every rank.",
    "set_model_state_dict": _ANY,
    "set_optimizer_state_dict": _ANY,
    "set_state_dict": _ANY,
    "state_dict": _SAVING,
    "summon_full_params": _ANY,
    "the backward pass of a DDP model": (
        "sums gradients over all ranks of its process group: run it on each of them, or build the model with "
        "`process_group=` a group of the ranks that train it, such as `subgroup`."
    ),
    "the forward pass of a DDP model": (
        "synchronizes buffers with all ranks: run the same model on every rank, and all in the same order."
    ),
    "the forward pass of an FSDP model": (
        "gathers its parameters from all ranks: run the same modules (experts, blocks) on every rank in the same order."
    ),
    "the forward pass of a tensor-parallel layer": (
        "exchanges activations with all ranks of its mesh: run the layer on every rank of it."
    ),
    "unshard": _ANY,
}
"""Advice by function name; the text follows the name."""
PUBLIC_NAMES = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "allgather": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather_single",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "recv_anysource": "recv",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single",
}
"""Public names of process-group operations."""


def advice_for(functions: Iterable[str]) -> str:
    """Return advice on the first known function: one sentence with a leading space, or an empty string."""
    for function in functions:
        if advice := COLLECTIVE_FUNCTIONS.get(function):
            return f" {function[0].upper() + function[1:] if ' ' in function else f'`{function}()`'} {advice}"
    return ""
