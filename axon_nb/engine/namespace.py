"""The names that every cell finds, and torchrun's environment variables.

Variables of this rank by name, with what is reached from them by attributes and indices; nothing is called.
"""

from __future__ import annotations

import ast
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.world import World
from axon_nb.engine.session import JoinConfig
from axon_nb.errors import UsageError

__all__ = ["PREDEFINED_NAMES", "inject_names", "resolve_variable", "set_environment", "user_variables"]

PREDEFINED_NAMES = ("rank", "local_rank", "world_size", "device", "world", "dist", "torch")
"""Names that every rank has of its own."""


def inject_names(namespace: dict[str, Any], config: JoinConfig, device: torch.device) -> None:
    """Put `rank, local_rank, world_size, device, world, mesh, dist, torch` into `namespace`."""
    namespace.update(
        rank=config.rank,
        local_rank=config.local_rank,
        world_size=config.world_size,
        device=device,
        world=World.init(),
        mesh=None,
        dist=dist,
        torch=torch,
    )


def user_variables(shell: Any) -> dict[str, Any]:
    """What the user's cells have left in the namespace of an IPython shell; names with an underscore are not told."""
    hidden = {*shell.user_ns_hidden, *PREDEFINED_NAMES}
    namespace = list(shell.user_ns.items())  # a thread may ask while a cell runs
    return {name: value for name, value in namespace if name not in hidden and not name.startswith("_")}


def set_environment(config: JoinConfig) -> None:
    """Set what torchrun sets, so that unmodified scripts run in a cell."""
    sys.argv = [""]  # as at a prompt: a script's argparse is not to see the arguments of this process
    os.environ.update(
        RANK=str(config.rank),
        LOCAL_RANK=str(config.local_rank),
        WORLD_SIZE=str(config.world_size),
        LOCAL_WORLD_SIZE=str(config.local_world_size),
        GROUP_RANK=str(config.node_rank),
        GROUP_WORLD_SIZE=str(-(-config.world_size // max(config.local_world_size, 1))),
        ROLE_RANK=str(config.rank),
        ROLE_WORLD_SIZE=str(config.world_size),
        ROLE_NAME="default",
        MASTER_ADDR=config.master_addr,
        MASTER_PORT=str(config.master_port),
        TORCHELASTIC_RUN_ID="axon_nb",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
    )


def resolve_variable(name: str, space: dict[str, Any]) -> Any:
    """The value of a name with ``.attributes`` and constant ``[indices]`` behind it.

    Args:
        name: Such as ``model.layers[0]``.
        space: The variables.

    Raises:
        UsageError: there is no such variable, or it is more than a name.
    """
    try:
        node = ast.parse(name, mode="eval").body
    except SyntaxError:
        raise UsageError(f"{name!r} is no name of a variable.") from None
    steps: list[tuple[bool, Any]] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            steps.append((True, node.attr))
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            steps.append((False, node.slice.value))
        else:
            raise UsageError(f"{name!r}: a variable, with .attributes and [indices] behind it, can be shown.")
        node = node.value
    if node.id not in space:
        raise UsageError(f"there is no variable {node.id!r}.")
    value = space[node.id]
    for is_attribute, key in reversed(steps):
        try:
            value = getattr(value, key) if is_attribute else value[key]
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise UsageError(f"{name!r}: {type(error).__name__}: {error}") from None
    return value
