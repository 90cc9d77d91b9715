"""Read rank and world size from a launcher's environment: torchrun, Open MPI, MPICH and Intel MPI, Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping

from axon_nb.records.environment import MASTER_ADDR, MASTER_PORT, MPICH, OPEN_MPI, SLURM, SLURM_HOSTS, TORCHRUN

__all__ = ["torchrun_environment"]

# For each launcher: rank, world size, local rank, local world size.
_LAUNCHERS = (TORCHRUN.names, OPEN_MPI.names, MPICH.names, SLURM.names)
_NAMES = TORCHRUN.names


def torchrun_environment(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return torchrun's variables, whichever launcher set them; None if none did.

    MASTER_ADDR is used if set. Otherwise it is the first host of the Slurm job, or this host if all ranks run on it.
    """
    for launcher in _LAUNCHERS:
        if launcher[0] in environment and launcher[1] in environment:
            found = {
                name: environment[theirs]
                for name, theirs in zip(_NAMES, launcher, strict=True)
                if theirs in environment
            }
            found["LOCAL_WORLD_SIZE"] = re.match(r"\d+", found.get("LOCAL_WORLD_SIZE", found["WORLD_SIZE"]))[0]  # type: ignore[index]
            found.setdefault("LOCAL_RANK", "0" if found["WORLD_SIZE"] == "1" else found["RANK"])
            found["MASTER_ADDR"] = MASTER_ADDR.get(environment) or _first_host(environment)
            found["MASTER_PORT"] = MASTER_PORT.get(environment)
            return found
    return None


def _first_host(environment: Mapping[str, str]) -> str:
    """Return the first host of Slurm's list, such as ``node[03-07,9]``."""
    hosts = SLURM_HOSTS.get(environment)
    match = re.match(r"([^\[,]+)(?:\[(\d+))?", hosts)
    return match[1] + (match[2] or "") if match else "127.0.0.1"
