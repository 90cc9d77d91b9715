"""`python -m axon_nb.doctor.nvml`: prints what the NVIDIA driver reports about its GPUs, as JSON.

A separate process, since a broken driver may hang. Never initialises CUDA, which takes memory on each GPU.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Print one JSON object: whether nvidia-ml-py and libcuda are available, an error, versions, the GPUs."""
    json.dump(_facts(), sys.stdout)


def _facts() -> dict[str, Any]:
    facts: dict[str, Any] = {"package": True, "libcuda": _loads("libcuda.so.1"), "error": "", "gpus": []}
    try:
        import pynvml as nvml
    except ModuleNotFoundError:
        return facts | {"package": False}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return facts
    except nvml.NVMLError as error:
        return facts | {"error": str(error)}
    cuda = _try(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2) or 0
    return facts | {
        "driver": _try(nvml, nvml.nvmlSystemGetDriverVersion),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        "gpus": [_gpu(nvml, index) for index in range(_try(nvml, nvml.nvmlDeviceGetCount) or 0)],
    }


def _gpu(nvml: Any, index: int) -> dict[str, Any]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return {"index": index, "error": str(error)}
    mode = _try(nvml, nvml.nvmlDeviceGetMigMode, handle)
    mig = bool(mode and mode[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    return {
        "index": index,
        **_identity(nvml, handle),
        "exclusive": _try(nvml, nvml.nvmlDeviceGetComputeMode, handle) == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
        "mig": mig,
        "instances": _instances(nvml, handle) if mig else [],
        "processes": _processes(nvml, handle),
    }


def _identity(nvml: Any, handle: Any) -> dict[str, Any]:
    # Version 2 excludes memory that the driver itself reserves, as nvidia-smi does.
    memory = _try(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    memory = memory or _try(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    return {
        "uuid": _try(nvml, nvml.nvmlDeviceGetUUID, handle),
        "name": _try(nvml, nvml.nvmlDeviceGetName, handle),
        "total_bytes": int(memory.total) if memory else None,
        "used_bytes": int(memory.used) if memory else None,
    }


def _instances(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    found = []
    for place in range(_try(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        instance = _try(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)
        if instance is not None:
            found.append(_identity(nvml, instance) | {"processes": _processes(nvml, instance)})
    return found


def _processes(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    running = _try(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    return [{"pid": int(one.pid), "used_bytes": one.usedGpuMemory} for one in running]


def _try(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call an NVML function; None if this GPU or driver does not support it."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
