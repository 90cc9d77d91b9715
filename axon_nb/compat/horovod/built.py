"""Horovod's queries about available backends, such as `nccl_built`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from axon_nb.compat.horovod.errors import NotSupportedError

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_enabled() -> bool:
    """False: nothing here uses MPI."""
    return False


def mpi_built() -> bool:
    """False: nothing here uses MPI."""
    return False


def mpi_threads_supported() -> bool:
    """Raise: this cannot be answered without MPI.

    Raises:
        NotSupportedError: always; a ValueError, as in Horovod without MPI.
    """
    raise NotSupportedError("Horovod MPI is not enabled here; see hvd.gloo_enabled() and hvd.nccl_built().")


def gloo_enabled() -> bool:
    """Whether torch has Gloo, which is used for CPU tensors."""
    return dist.is_gloo_available()


def gloo_built() -> bool:
    """Whether torch has Gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """NCCL's version as a number, such as 22703 for 2.27.3; 0 if torch lacks NCCL."""
    if not dist.is_nccl_available():
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def ddl_built() -> bool:
    """False: DDL is not supported."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is not supported."""
    return False


def cuda_built() -> bool:
    """Whether torch was built with CUDA."""
    return bool(torch.backends.cuda.is_built())


def rocm_built() -> bool:
    """Whether torch was built with ROCm."""
    return torch.version.hip is not None
