"""Parameters that FSDP2 has made whole for the moment. Private hook: FSDP2's parameter groups.

Where they are missing, such parameters are taken for plain tensors of each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from axon_nb.torch_api import torch_api

__all__ = ["missing_gathering_hooks", "whole_parameters"]


def missing_gathering_hooks() -> list[str]:
    """Names of the hooks that this torch does not have."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    needed = {"FSDPParam": getattr(_fsdp_param, "FSDPParam", None), "ShardedState": _state_type()}
    names = [name for name, found in needed.items() if found is None]
    return names or [name for name in ("unsharded_param",) if not hasattr(needed["FSDPParam"], name)]


def _state_type() -> Any:
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
    return getattr(module, "ShardedState", None)


def whole_parameters(modules: Iterable[Any]) -> dict[int, Any]:
    """The sharded form (a DTensor) of each parameter that is whole now, by the `id` of the whole one.

    Args:
        modules: Modules among which those that FSDP2 manages are looked for.
    """
    state_type, found = _state_type(), {}
    if state_type is None:
        return {}
    for module in modules:
        if not hasattr(module, "_get_fsdp_state"):
            continue
        for group in torch_api().fsdp_parameter_groups(module._get_fsdp_state()):
            for parameter in getattr(group, "fsdp_params", ()):
                if getattr(parameter, "sharded_state", None) is state_type.UNSHARDED:
                    found[id(parameter.unsharded_param)] = parameter.sharded_param
    return found
