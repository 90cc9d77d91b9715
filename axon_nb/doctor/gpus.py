"""GPUs: what the driver reports, whether torch can use them, and what else uses them."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Mapping
from typing import Any

import psutil

from axon_nb.doctor.children import Answer
from axon_nb.doctor.report import Finding, Section
from axon_nb.doctor.versions import pip
from axon_nb.host.resources.container import container_kind
from axon_nb.host.resources.gpus import Gpu, list_gpus
from axon_nb.records.units import format_bytes

NVML = ("-m", "axon_nb.host.resources.nvml")
"""Python arguments of the child that queries the driver."""

_HANGING_ABORTS = {"2.17.1": "pytorch#119215", "2.25.1": "pytorch#149153"}
"""Versions of NCCL whose abort is known to hang, with the reports."""

_NONE = "none; ranks compute on CPUs and communicate through shared memory"


def gpus(nvml: Answer, build: Answer, owners: Mapping[int, str]) -> Section:
    """Report the GPUs, and what keeps ranks from using them.

    Args:
        nvml: Result of the child `NVML`.
        build: Result of the child `TORCH_BUILD`.
        owners: Display names of processes by pid: the ranks of this user's clusters.
    """
    facts: dict[str, Any] = dict(nvml.content)
    cards: list[dict[str, Any]] = facts.get("gpus") or []
    planned = list_gpus()
    if cards:
        findings = [_driver(facts), *_nvidia_smi(planned), *(line for card in cards for line in _card(card, owners))]
    elif planned:
        findings = [*map(_plain_card, planned), *_no_nvml(nvml)]
    else:
        findings = [_absent(nvml)]
    if cards or planned:
        findings += _usable(build, facts)
    return Section("GPUs", tuple(findings), {**facts, "nccl": build.content.get("nccl")})


def _driver(facts: Mapping[str, Any]) -> Finding:
    return Finding("driver", f"{facts.get('driver') or 'unknown'} (CUDA up to {facts.get('cuda') or 'unknown'})")


def _nvidia_smi(planned: list[Gpu]) -> list[Finding]:
    if planned or os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return []
    program = shutil.which("nvidia-smi")
    value = f"{program} lists no GPU" if program else "not on the PATH"
    fix = f"Run `{program}` to see why." if program else "Add the folder of `nvidia-smi` to the PATH of Jupyter."
    return [Finding("nvidia-smi", value, "problem", "`%distributed start` uses it to find GPUs, and finds none.", fix)]


def _card(card: Mapping[str, Any], owners: Mapping[int, str]) -> list[Finding]:
    label = f"GPU {card['index']}"
    if "error" in card:
        message = "The driver lost this GPU; no rank can use it."
        return [
            Finding(label, card["error"], "problem", message, "Restart the machine; the kernel log has the reason.")
        ]
    value = f"{card['name']}, {_memory(card)}"
    users = _users(card, owners)
    if users:
        value += f" by {users}"
    return [_state(label, value, card, owners), *(_instance(label, one, owners) for one in card["instances"])]


def _state(label: str, value: str, card: Mapping[str, Any], owners: Mapping[int, str]) -> Finding:
    number = card["index"]
    if card["mig"]:
        return Finding(
            label, f"{value}, MIG on with {len(card['instances'])} instances", "note",
            "Each rank uses one instance, and NCCL does not connect them: such ranks use Gloo.",
            f"To use all of it, run `nvidia-smi -i {number} -mig 0` as root while nothing runs on it.",
        )  # fmt: skip
    if card["exclusive"]:
        return Finding(
            label, f"{value}, exclusive mode", "note", "It accepts only one process: ranks cannot share it.",
            f"To share it, run `nvidia-smi -i {number} -c DEFAULT` as root.",
        )  # fmt: skip
    others = any(one["pid"] not in owners for one in card["processes"])
    used = Gpu(number, "", card["total_bytes"] or 0, card["used_bytes"] or 0)
    if used.busy and (others or not card["processes"]):
        return Finding(
            label, value, "note", "`%distributed start` skips it while more than 512 MiB are in use.",
            f"Stop the processes that use it, or run `%distributed start --devices {number}` to use it anyway.",
        )  # fmt: skip
    return Finding(label, value)


def _instance(label: str, card: Mapping[str, Any], owners: Mapping[int, str]) -> Finding:
    users = _users(card, owners)
    return Finding(f"{label} MIG", f"{card['name']}, {_memory(card)}{f' by {users}' if users else ''}, {card['uuid']}")


def _memory(card: Mapping[str, Any]) -> str:
    if card["total_bytes"] is None:
        return "memory shared with the host"
    return f"{format_bytes(card['used_bytes'])} of {format_bytes(card['total_bytes'])} used"


def _users(card: Mapping[str, Any], owners: Mapping[int, str]) -> str:
    parts = []
    for one in card["processes"]:
        used = one["used_bytes"]
        name = owners.get(one["pid"]) or _name(one["pid"])
        parts.append(f"{name} (pid {one['pid']}{f', {format_bytes(used)}' if used else ''})")
    return ", ".join(parts)


def _name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "a process not visible here"


def _plain_card(gpu: Gpu) -> Finding:
    used = f"{format_bytes(gpu.used_bytes)} of {format_bytes(gpu.total_bytes)} used"
    return Finding(f"GPU {gpu.index}", f"{gpu.name}, {used if gpu.total_bytes else 'memory unknown'}")


def _no_nvml(nvml: Answer) -> list[Finding]:
    """Explain why NVML shows nothing although nvidia-smi does."""
    if nvml.content.get("package") is False:
        message = "Without it doctor cannot show MIG instances or the processes that use GPUs."
        return [Finding("nvidia-ml-py", "missing", "note", message, f"Run `{pip()} install nvidia-ml-py`.")]
    why = nvml.failure or nvml.content.get("error") or "finds no GPU"
    return [Finding("NVML", why, "note", "nvidia-smi still lists GPUs.", "Run `nvidia-smi -q` for details.")]


def _absent(nvml: Answer) -> Finding:
    """No GPU is visible: find out whether there may still be one."""
    nodes = sorted(glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dxg"))
    error, here = nvml.content.get("error") or nvml.failure, bool(nvml.content.get("libcuda"))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if nodes and nvml.content.get("package") is False:
        return Finding(
            "NVIDIA", f"{', '.join(nodes)} exist, but neither nvidia-smi nor nvidia-ml-py is installed", "problem",
            "`%distributed start` uses nvidia-smi to find GPUs, and finds none.",
            "Install the driver's utilities, which include `nvidia-smi`, then run doctor again.",
        )  # fmt: skip
    if nodes or error:
        there = f"{', '.join(nodes)} exist, but " if nodes else ""
        fix = "Run `nvidia-smi` to see why."
        if error and "mismatch" in error.lower():
            fix = "Restart the machine: the driver was updated while its old version was loaded."
        return Finding(
            "NVIDIA", f"{there}NVML finds none: {error or 'no driver library'}", "problem" if nodes else "note",
            "Ranks compute on CPUs.", fix,
        )  # fmt: skip
    if here and container_kind() in ("docker", "podman"):
        return Finding(
            "NVIDIA", "none, although libcuda is installed", "note", "Ranks compute on CPUs.",
            "If the host has GPUs, start the container with `--gpus all`.",
        )  # fmt: skip
    return Finding("NVIDIA", f"{_NONE} (CUDA_VISIBLE_DEVICES={hidden!r})" if hidden is not None else _NONE)


def _nccl(version: str | None) -> Finding:
    if version is None:
        return Finding("NCCL", "none in this torch")
    if issue := _HANGING_ABORTS.get(version):
        return Finding(
            "NCCL", version, "note", f"An abort can hang with this version ({issue}), so `repair` may be needed more "
            "often.", "Install a torch with another version of NCCL.",
        )  # fmt: skip
    return Finding("NCCL", version)


def _usable(build: Answer, facts: Mapping[str, Any]) -> list[Finding]:
    """Check whether torch can use the GPUs."""
    torch = build.content
    if not torch:
        return []
    nccl = _nccl(torch["nccl"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not torch["cuda"]:
        return [
            Finding(
                "torch", f"{torch['torch']} is built without CUDA", "problem", "Ranks cannot use the GPUs.",
                "Install a build of torch for CUDA "
                f"{facts.get('cuda') or 'that the driver supports'} or older, then restart the kernel.",
            )
        ]  # fmt: skip
    if torch["gpus"]:
        return [nccl]
    if visible is not None and not list_gpus():
        fix = "Unset CUDA_VISIBLE_DEVICES before you start Jupyter."
        if visible.startswith("MIG-"):
            fix = "Set it to a MIG instance that `nvidia-smi -L` lists, or unset it, where Jupyter is started."
        return [nccl, Finding("visible", f"CUDA_VISIBLE_DEVICES={visible!r}", "note", "It hides all GPUs.", fix)]
    warning = next((line.strip() for line in build.stderr.splitlines() if "CUDA" in line or "driver" in line), "")
    if "too old" in warning:
        fix = f"Update the NVIDIA driver, or install a build of torch for CUDA {facts.get('cuda') or '(see driver)'}."
    else:
        fix = 'Run `python -c "import torch; torch.cuda.init()"` to see why.'
    value = warning or "torch.cuda.is_available() is False"
    return [nccl, Finding("torch", value, "problem", "Ranks cannot use the GPUs.", fix)]
