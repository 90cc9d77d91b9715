"""How much memory a rank could have: of its GPU, or of its host, where a cgroup may allow less than there is."""

from __future__ import annotations

import torch

from axon_nb.host.free_memory import free_memory

__all__ = ["capacity"]


def capacity(device: torch.device, resident: int) -> tuple[int | None, int | None]:
    """(what there is for this rank, what of it is taken), in bytes; None: not known.

    Args:
        device: What the rank computes on. Of a CUDA device: all its memory, and what all processes have of it.
        resident: Resident memory of the process. On a CPU: that and what is free on the host.
    """
    if device.type == "cuda":
        if not torch.cuda.is_initialized():  # asking would initialise it
            return None, None
        free, total = torch.cuda.mem_get_info(device)
        return total, total - free
    room = free_memory()
    return (None, None) if room is None else (resident + room, resident)
