"""The names that every cell finds, and torchrun's environment variables."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.world import World
from axon_nb.engine.session import JoinConfig

__all__ = ["OWN_NAMES", "inject_names", "set_environment", "users_variables"]

OWN_NAMES = ("rank", "local_rank", "world_size", "device", "world", "dist", "torch")
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


def users_variables(shell: Any) -> dict[str, Any]:
    """What the user's cells have left in the namespace of an IPython shell; names with an underscore are not told."""
    hidden = {*shell.user_ns_hidden, *OWN_NAMES}
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
