"""`python -m axon_nb.host.nvml`: prints what the NVIDIA driver reports about its GPUs, as JSON.

A separate process, since a broken driver may hang. Never initialises CUDA, which takes memory on each GPU.

With ``--report`` it prints a `GpuReport` for the host agent; with arguments of `nvidia-smi` (``-L``, or a query) what
that would print, for machines without the program.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from axon_nb.records.protocol.wire import encode
from axon_nb.records.telemetry import GpuReport, GpuUse

_LIMIT_S = 60


def main(arguments: Sequence[str] = ()) -> None:
    """Print one JSON object: whether nvidia-ml-py and libcuda are available, an error, versions, the GPUs.

    Args:
        arguments: Arguments of the command line; see the module.
    """
    signal.alarm(_LIMIT_S)  # a driver that hangs ends this process
    facts = _facts()
    if not arguments:
        json.dump(facts, sys.stdout)
    elif arguments[0] == "--report":
        json.dump(encode(_report(facts)), sys.stdout)
    else:
        print("\n".join(_listed(facts["gpus"], instances="-L" in arguments)))


def _report(facts: dict[str, Any]) -> GpuReport:
    if not facts["package"]:
        return GpuReport((), "nvidia-ml-py is not installed beside axon_nb: run `pip install nvidia-ml-py`.")
    uses = []
    for card in facts["gpus"]:
        for one in (card, *card.get("instances", ())):
            own = {name: one[name] for name in GpuUse.__struct_fields__ if one.get(name) is not None}
            if "uuid" in own:
                uses.append(GpuUse(**{"name": "GPU", **own, "index": card["index"]}))
    lost = ", ".join(f"GPU {card['index']}: {card['error']}" for card in facts["gpus"] if "error" in card)
    return GpuReport(tuple(uses), lost or facts["error"])


def _listed(cards: Sequence[Mapping[str, Any]], *, instances: bool) -> list[str]:
    """Return lines as of `nvidia-smi -L`, with MIG instances, or of the query that `list_gpus` makes."""
    lines = []
    for card in cards:
        if not card.get("uuid"):
            continue
        if instances:
            lines.append(f"GPU {card['index']}: {card['name']} (UUID: {card['uuid']})")
            for number, part in enumerate(card["instances"]):
                profile = (part["name"] or "").rpartition("MIG ")[2]
                lines.append(f"  MIG {profile}     Device  {number}: (UUID: {part['uuid']})")
        else:
            sizes = (card["total_bytes"] or 0) >> 20, (card["used_bytes"] or 0) >> 20
            lines.append(f"{card['index']}, {card['uuid']}, {card['name']}, {sizes[0]}, {sizes[1]}")
    return lines


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
        **_load(nvml, handle),
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


def _load(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return utilisation in percent, temperature in degrees Celsius and power in watts; None: not supported."""
    rates = _try(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    milliwatts = _try(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    return {
        "busy_percent": int(rates.gpu) if rates else None,
        "temperature_c": _try(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        "power_w": milliwatts / 1000 if milliwatts is not None else None,
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
    main(sys.argv[1:])
