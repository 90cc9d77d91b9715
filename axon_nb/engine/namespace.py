"""The names predefined in every cell, torchrun's environment variables, and lookup of variables by name.

A lookup follows attributes and indices; it calls nothing.
"""

from __future__ import annotations

import ast
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.world import World
from axon_nb.errors import UsageError
from axon_nb.records.protocol.joining import JoinConfig

PREDEFINED_NAMES = ("rank", "local_rank", "world_size", "device", "world", "dist", "torch")
"""Names that axon_nb defines on every rank."""


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
    """Variables that the user's cells defined in an IPython shell; names that start with an underscore are left out."""
    hidden = {*shell.user_ns_hidden, *PREDEFINED_NAMES}
    namespace = list(shell.user_ns.items())  # a copy: another thread may read while a cell runs
    return {name: value for name, value in namespace if name not in hidden and not name.startswith("_")}


def set_environment(config: JoinConfig) -> None:
    """Set the variables that torchrun sets, so that unmodified scripts run in a cell."""
    sys.argv = [""]  # as at a prompt: a script's argparse must not see the arguments of this process
    set_world_environment(config)


def set_world_environment(config: JoinConfig) -> None:
    """Set those variables alone, as when the world changes its size."""
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
    """Look up a variable, optionally followed by ``.attributes`` and constant ``[indices]``.

    Args:
        name: An expression such as ``model.layers[0]``.
        space: Variables by name.

    Raises:
        UsageError: the variable does not exist, or `name` is another kind of expression.
    """
    try:
        node = ast.parse(name, mode="eval").body
    except SyntaxError:
        raise UsageError(f"{name!r} is not the name of a variable.") from None
    steps: list[tuple[bool, Any]] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            steps.append((True, node.attr))
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            steps.append((False, node.slice.value))
        else:
            raise UsageError(f"{name!r} must be a variable, optionally with .attributes and [indices].")
        node = node.value
    if node.id not in space:
        raise UsageError(f"variable {node.id!r} does not exist.")
    value = space[node.id]
    for is_attribute, key in reversed(steps):
        try:
            value = getattr(value, key) if is_attribute else value[key]
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise UsageError(f"{name!r}: {type(error).__name__}: {error}") from None
    return value
