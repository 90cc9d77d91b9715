"""Hints on what to do about a failure: missing packages, full shared memory, lost CUDA contexts, equal random draws."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType

from IPython.core.getipython import get_ipython

from axon_nb.cluster.failures.report import REPAIR_HINT, RankError
from axon_nb.records.protocol.cells import CellEnd
from axon_nb.records.ranks import format_ranks, name_ranks
from axon_nb.records.units import format_bytes

_DISTRIBUTIONS = {
    "accelerate": "accelerate",
    "cupy": "cupy-cuda13x",
    "deepspeed": "deepspeed",
    "pynvml": "nvidia-ml-py",
    "tensorboard": "tensorboard",
    "transformers": "transformers",
}
_NO_SHARED_MEMORY = re.compile(
    r"unable to (allocate|mmap|open|write) .*shared memory|out of shared memory|Bus error"
    r"|creating shared memory segment|/dev/shm/nccl"
)
_NO_PEER_ACCESS = re.compile(r"peer access is not supported|peer mapping resources exhausted")
_SAME_GPU = re.compile(r"Duplicate GPU detected")
_NCCL_ERROR = re.compile(r"NCCL error|ncclSystemError|ncclInternalError|ncclRemoteError|ncclUnhandledCudaError")
_NO_THREADS = re.compile(r"can't start new thread|Resource temporarily unavailable")
_NO_FILES = re.compile(r"Too many open files")
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")
_NO_COMPILER = re.compile(r"No working C\+\+ compiler|Ninja is required to load C\+\+|ninja not being installed")
_NO_NAME = re.compile(r"name '(\w+)' is not defined")
_SYNC_BATCH_NORM = "SyncBatchNorm expected input tensor to be on GPU"
_MISMATCHES = ("CollectiveMismatchError", "TensorMismatchError")
# Errors after which, as CUDA documents, the process is in an inconsistent state: only a new process can use the GPU.
# Running out of memory is not one of them.
_STICKY = (
    "an illegal instruction was encountered",
    "an illegal memory access was encountered",
    "device-side assert triggered",
    "hardware stack error",
    "invalid program counter",
    "misaligned address",
    "operation not supported on global/shared address space",
    "the launch timed out and was terminated",
    "uncorrectable ECC error encountered",
    "unspecified launch failure",
)


def missing_package(module: str) -> str:
    """Return one sentence with the fix for a missing module; empty if axon_nb does not know the module.

    Args:
        module: The value of ``ModuleNotFoundError.name``.
    """
    if module.partition(".")[0] == "horovod":
        return (
            "Horovod does not build with current versions of torch: use `import axon_nb.compat.horovod as hvd`, which "
            "has its API."
        )
    distribution = _DISTRIBUTIONS.get(module)
    if distribution is None:
        return ""
    return (
        f"`{module}` is not installed where the ranks run. "
        f"Run `pip install {distribution}` there, then run the cell again."
    )


def _missing_name(error: RankError) -> str:
    """Return what to do about a name that only the notebook has; empty if it has none of that name."""
    match = _NO_NAME.search(error.evalue) if error.ename == "NameError" else None
    shell = get_ipython()
    if match is None or shell is None or match[1] not in shell.user_ns:
        return ""
    name, value = match[1], shell.user_ns[match[1]]
    if isinstance(value, ModuleType):
        return f"Only the notebook has imported `{name}`: import it in a `%%distributed` cell."
    if callable(value) and hasattr(value, "__qualname__"):
        return (
            f"Only the notebook has defined `{name}`: run its definition in a `%%distributed` cell, or `%push {name}`."
        )
    return f"Only the notebook has `{name}`: `%push {name}` sends it to the ranks."


def hint_for(errors: Iterable[RankError], *, remedy: str = REPAIR_HINT, threads: Iterable[str] = ()) -> str:
    """Return a sentence or two on what to do about the errors; empty if there is nothing to add.

    Args:
        errors: The failures of a cell.
        remedy: How to get a dead or stuck rank back; see `Health.remedy`.
        threads: Names of the user's threads that communicated in the cell.
    """
    hints: list[str] = []
    all_errors = list(errors)
    modules = [_NO_MODULE.search(error.evalue) for error in all_errors if error.ename == "ModuleNotFoundError"]
    hints += dict.fromkeys(sentence for match in modules if match and (sentence := missing_package(match[1])))
    hints += dict.fromkeys(filter(None, map(_missing_name, all_errors)))
    if any(_SYNC_BATCH_NORM in error.evalue for error in all_errors):
        hints.append("torch's SyncBatchNorm has no CPU version: use `axon_nb.parallel.SyncBatchNorm`.")
    names = ", ".join(dict.fromkeys(threads))
    if names and any(error.ename in _MISMATCHES for error in all_errors):
        hints.append(
            f"Threads of the ranks ({names}) communicate in the same group as the main thread, in any order: give them "
            "a group with `dist.new_group()`, such as `dcp.async_save(…, process_group=group)`."
        )
    if any(_NO_COMPILER.search(error.evalue) for error in all_errors):
        hints.append("This cell compiles C++: install a compiler (`apt install g++`) and ninja (`pip install ninja`).")
    if {error.kind for error in all_errors} & {"died", "stuck"}:
        hints.append(remedy)
    if any(_NO_SHARED_MEMORY.search(error.evalue) for error in all_errors):
        hints.append(
            f"Shared memory is full: /dev/shm holds {_size('/dev/shm')}, and DataLoader workers and NCCL pass data "
            "through it. Use `num_workers=0`, or enlarge it with `docker run --shm-size=2g` or "
            "`mount -o remount,size=2g /dev/shm`."
        )
    if any(_NO_THREADS.search(error.evalue) for error in all_errors):
        hints.append(
            "A limit of processes and threads is reached: raise `ulimit -u`, or start the container with a higher "
            "`--pids-limit`."
        )
    if any(_NO_FILES.search(error.evalue) for error in all_errors):
        hints.append("A limit of open files is reached: close files on the ranks, or raise `ulimit -n`.")
    hints += _nccl_hints([error.evalue for error in all_errors])
    return " ".join(hints)


def _nccl_hints(texts: Sequence[str]) -> list[str]:
    if any(map(_SAME_GPU.search, texts)):
        return ["NCCL needs one GPU per rank: use fewer ranks, or `--backend gloo` for ranks that share one."]
    if any(map(_NO_PEER_ACCESS.search, texts)):
        return ["These GPUs cannot read each other's memory: set `NCCL_P2P_DISABLE=1` and start the ranks again."]
    if any(map(_NCCL_ERROR.search, texts)) and not any(map(_NO_SHARED_MEMORY.search, texts)):
        return ["To see NCCL's own messages, set `NCCL_DEBUG=WARN` and start the ranks again."]
    return []


def _size(folder: str) -> str:
    try:
        facts = os.statvfs(folder)
    except OSError:
        return "nothing"
    return format_bytes(facts.f_blocks * facts.f_frsize)


def shortage_hint(reports: Mapping[int, CellEnd]) -> str:
    """Return what filled the memory of a rank that ran out of it, and what would take less; empty if none did.

    Args:
        reports: What each rank reported at the end of the cell.
    """
    short = {rank: end.shortage for rank, end in reports.items() if end.shortage is not None}
    if not short:
        return ""
    rank = min(short, key=lambda rank: (-short[rank].use.total, rank))
    found = short[rank]
    roles = sorted((item for item in found.use.by_role.items() if item[1]), key=lambda item: -item[1])
    parts = ", ".join(f"{role} {format_bytes(size)}" for role, size in roles) or "no tensors"
    room = "" if found.use.capacity is None else f" of {format_bytes(found.use.capacity)}"
    text = f"Rank {rank} ran out of memory; its tensors took {format_bytes(found.use.total)}{room}: {parts}."
    if found.states > found.sharded > 0:
        text += (
            f" With FSDP over {found.world_size} ranks, parameters, gradients and optimizer states would take "
            f"{format_bytes(found.sharded)} per rank instead of {format_bytes(found.states)}."
        )
    return f"{text} `%memory` on a model predicts other setups."


def shared_draws_hint(reports: Mapping[int, CellEnd], ranks: Sequence[int]) -> str:
    """Return a hint if ranks drew the same random numbers where model replicas should not; else an empty string.

    Args:
        reports: What each rank reported at the end of the cell.
        ranks: The ranks of the cell.
    """
    draws = [reports[rank].draws if rank in reports else None for rank in ranks]
    first = draws[0] if draws else None
    if len(draws) < 2 or first is None or any(other is None or other.states != first.states for other in draws):
        return ""
    reasons = []
    if name := first.dropout:
        reasons.append(f"the dropout masks of `{name}` are the same on all of them")
    if name := first.loader:
        reasons.append(f"`{name}` shuffles identically, so without a `DistributedSampler` all get the same batches")
    if not reasons:
        return ""
    return (
        f"Hint: {name_ranks(ranks)} drew the same random numbers: {', and '.join(reasons)}. "
        "Run `%distributed seed 0 --per-rank` to give each rank its own."
    )


def left_calls_hint(reports: Mapping[int, CellEnd]) -> str:
    """Return what it means that ranks left calls before they were over; empty if none did."""
    left = [f"rank {rank} left {call}" for rank, end in sorted(reports.items()) for call in end.left]
    if not left:
        return ""
    sentence = (
        f"{', '.join(left)} before it was over: the process groups were rebuilt, so the next cell starts in step."
    )
    return sentence[0].upper() + sentence[1:]


def lost_contexts(errors: Mapping[int, RankError]) -> list[int]:
    """Return the ranks whose error means that they lost their CUDA context."""
    return [
        rank
        for rank, error in sorted(errors.items())
        if error.kind == "raised" and "CUDA" in error.evalue and any(text in error.evalue for text in _STICKY)
    ]


def context_hint(errors: Mapping[int, RankError]) -> str:
    """Return what a lost CUDA context means and how to recover; empty if no rank lost its context."""
    ranks = lost_contexts(errors)
    if not ranks:
        return ""
    one = len(ranks) == 1
    return (
        f"{name_ranks(ranks).capitalize()} lost {'its' if one else 'their'} CUDA context: every further use of the GPU "
        f"there fails, and {'its' if one else 'their'} tensors on it are gone. "
        f"Run `%distributed repair --ranks {format_ranks(ranks)}` to replace {'it' if one else 'them'}; "
        "all others keep their state."
    )
