"""NCCL by itself: versions, unique ids, and worlds over GPUs that are made by hand."""

from __future__ import annotations

from axon_nb.comm.nccl.backend import NcclBackend, NcclUniqueId, devices, is_available, nccl_version, unavailable_reason

__all__ = ["NcclBackend", "NcclUniqueId", "devices", "is_available", "nccl_version", "unavailable_reason"]
