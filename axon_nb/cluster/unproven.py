"""What a user of an NCCL cluster is told when a cell fails there for the first time."""

from __future__ import annotations

__all__ = ["UNPROVEN_ON_NCCL"]

UNPROVEN_ON_NCCL = (
    "Recovery on NCCL has not been tried on several GPUs. Lost is the step that was under way, and ranks may be a step "
    "apart; if a rank does not come back, `%distributed repair` or `%distributed restart` does it. Told once."
)
