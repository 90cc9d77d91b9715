"""How failures are worded: the root cause among the ranks' failures, how a rank died, and what to do about it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from types import ModuleType
from typing import NamedTuple

from IPython.core.getipython import get_ipython
from msgspec import Struct

from axon_nb.errors import CellError, CellInterrupt, CellTimeoutError
from axon_nb.records.protocol.agent import ControllerExit, Exit
from axon_nb.records.protocol.cells import CellEnd, ModelCalls, NotedInput
from axon_nb.records.ranks import format_ranks, name_ranks
from axon_nb.records.stacks import library_of
from axon_nb.records.units import format_bytes
from axon_nb.troubleshooting import MORE, more

REPAIR_HINT = "Run `%distributed repair` to replace the failed ranks; all others keep their state."
# A death brings down the other ranks, and an exception comes before the aborts that it causes elsewhere.
_ORDER = {"died": 0, "raised": 1, "stuck": 2, "aborted": 3}
_CRASH_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.+)$')
_FATAL = "Fatal Python error: "
_CRASH_STACK = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_DECORATORS = ("wrapper", "decorate_context", "inner", "_fn")
_MAX_LINE = 300
_INPUT_TOLERANCE = 0.02
"""Of a norm, by which activations may differ: ranks round alike, dropout changes much more."""
Frames = list[tuple[str, int, str]]
"""(file, line, function) of a thread's frames, innermost first."""
_OUT_OF_MEMORY = {True: ": out of memory", None: " (out of memory?)", False: ""}
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_CELL_FRAME = re.compile(r"Cell In\[(?P<cell>\d+)\], line (?P<line>\d+)(?:, in (?P<function>[\w.<>]+))?")
_ANY_FRAME = re.compile(r"^(?:(?P<cell>Cell In\[\d+\]), line |File (?P<file>[^\n]+?):)(?P<line>\d+)", re.MULTILINE)
_WAITED_IN = re.compile(r"\b(?:waits?|is|are) in (\w+) at line ")
_WAITED_AT = re.compile(r" at line (\d+)")
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


class RankError(Struct, frozen=True):
    """How a cell failed on one rank."""

    rank: int
    kind: str
    """``raised``, ``aborted`` (by the notebook), ``died`` or ``stuck``."""
    ename: str
    """Name of the exception's type; empty if none was raised."""
    evalue: str
    """The exception's message, or what happened."""
    traceback: tuple[str, ...] = ()
    """The rank's own traceback, with terminal colours."""
    remedy: str = ""
    """What to do about it, as a sentence; empty: what its kind needs."""

    def __str__(self) -> str:
        return f"{self.ename}: {self.evalue}" if self.ename else self.evalue


class Kept(Struct, frozen=True):
    """What is kept of ranks that died."""

    remedy: str = REPAIR_HINT
    """How to get dead and stuck ranks back, as a sentence."""
    text: str = ""
    """As a sentence; empty: only their variables are lost."""
    step: int | None = None
    """The last optimizer step to which a repair may bring all ranks back; None: it can bring them to none."""


class Failure(Struct, frozen=True):
    """How a cell failed, by rank."""

    cause: RankError
    """The failure to show first."""
    alike: tuple[int, ...]
    """Ranks that failed as the cause did."""
    errors: Mapping[int, RankError]
    """All failures by rank; ranks without one have finished the cell."""
    explanation: str = ""
    """Why the ranks could not finish, such as a deadlock; empty if the cause is an error of one rank."""
    hint: str = ""
    """What the user can do now; may be empty."""
    kept: Kept = Kept()
    """What is kept of ranks that died."""


def root_cause(errors: Mapping[int, RankError], first: Sequence[int] = ()) -> RankError:
    """Return the failure to show first.

    Args:
        errors: Failures by rank, not empty.
        first: Ranks in the order in which they failed.
    """
    arrival = {rank: position for position, rank in enumerate(first)}
    return min(errors.values(), key=lambda e: (_ORDER[e.kind], arrival.get(e.rank, len(arrival)), e.rank))


def cell_error(
    errors: Mapping[int, RankError],
    *,
    first: Sequence[int],
    explanation: str = "",
    hint: str = "",
    timeout_s: float | None = None,
    kept: Kept | None = None,
) -> CellError:
    """Create the exception of a failed cell: the root cause's traceback, then one line for each other failure.

    Args:
        errors: Failures by rank.
        first: Ranks in the order in which they failed.
        explanation: Why the ranks could not finish, such as a deadlock, if the cell was aborted for that.
        hint: What the user can do now; one sentence, may be empty.
        timeout_s: The cell's timeout in seconds if the cell exceeded it.
        kept: What is kept of ranks that died.
    """
    kept = kept or Kept()
    if explanation:
        aborted = {error.rank for error in errors.values() if error.kind == "aborted"}
        others = [*_others(errors, aborted), *more(explanation)]
        exception = CellError(explanation, [f"CellError: {explanation}"], in_card=others)
        if errors:
            cause = root_cause(errors, first)
            exception.failure = Failure(cause, (cause.rank,), dict(errors), explanation, hint, kept)
        return exception
    cause = root_cause(errors, first)
    alike = [e.rank for e in errors.values() if (e.kind, e.ename, e.evalue) == (cause.kind, cause.ename, cause.evalue)]
    who = name_ranks(alike)
    message = f"{who}: {cause}" if cause.kind == "raised" else f"{who} {agree(cause.evalue, len(alike))}"
    if timeout_s is not None:
        message = f"timed out after {timeout_s:g} s (--timeout); {message}"
    report = [f"[{who}]", *cause.traceback] if cause.traceback else [f"CellError: {message}"]
    others = _others(errors, set(alike))
    if timeout_s is not None:
        report += [*others, f"The cell timed out after {timeout_s:g} s (--timeout)."]
        others = []
    others += filter(None, (kept.text if cause.kind == "died" else "", hint))
    if not any(line.startswith(MORE) for text in cause.traceback for line in text.splitlines()):
        others += more("\n".join([hint, "" if cause.kind == "raised" else message]))
    kind = CellError if timeout_s is None else CellTimeoutError
    failed = kind(message, report, in_card=others)
    failed.failure = Failure(cause, tuple(alike), dict(errors), hint=hint, kept=kept)
    return failed


def interrupt_error(
    errors: Mapping[int, RankError], ranks: Sequence[int], replaced: Sequence[str] = ()
) -> CellInterrupt:
    """Create the exception of a cell that the user interrupted: which ranks stopped, and where each one was.

    Args:
        errors: Failures by rank; may be empty.
        ranks: The ranks of the cell.
        replaced: Sentences about the ranks that were replaced because they did not stop; may be empty.
    """
    stopped = [rank for rank in ranks if rank not in errors or errors[rank].kind != "stuck"]
    message = f"{name_ranks(stopped).capitalize()} stopped." if stopped else "No rank stopped."
    report = _others(errors, set())
    if replaced:
        report += replaced
    elif remedies := {error.remedy for error in errors.values() if error.remedy}:
        report += sorted(remedies)
    elif stuck := [rank for rank in ranks if rank not in stopped]:
        report.append(
            f"{name_ranks(stuck).capitalize()} did not stop. Run `%distributed repair --ranks {format_ranks(stuck)}` "
            f"to replace {'it' if len(stuck) == 1 else 'them'}; all other ranks keep their state. "
            "(A second interrupt while a cell is being aborted does the same.)"
        )
    return CellInterrupt(message, report)


def agree(text: str, count: int) -> str:
    """Put a description of one rank, such as ``was interrupted``, into the plural if there are several."""
    for one, many in (("was ", "were "), ("is ", "are ")):
        if count > 1 and text.startswith(one):
            return many + text.removeprefix(one).replace(" does not ", " do not ")
    return text


def _others(errors: Mapping[int, RankError], shown: set[int]) -> list[str]:
    groups: dict[tuple[bool, str], list[int]] = {}
    for error in errors.values():
        if error.rank not in shown:
            raised = error.kind == "raised"
            text = str(error) if raised else error.evalue
            groups.setdefault((raised, text.splitlines()[0][:200] if text else error.kind), []).append(error.rank)
    return [
        f"[{name_ranks(ranks)}] {text if raised else agree(text, len(ranks))}"
        for (raised, text), ranks in groups.items()
    ]


def describe_death(event: Exit | ControllerExit) -> str:
    """Describe how a rank or the controller died; the text reads after its name.

    Args:
        event: The host agent's event.
    """
    if isinstance(event, Exit) and event.host_lost:
        return f"was lost with its host {event.host!r}: {event.host_lost}"
    code, output, crash = event.code, event.last_output, event.crash
    if code >= 0:
        text = f"exited with code {code}"
    else:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        text = f"was killed by {name}" + (_OUT_OF_MEMORY[event.out_of_memory] if name == "SIGKILL" else "")
    if isinstance(event, Exit) and event.host:
        text += f" on the host {event.host!r}"
    text += crash_location(crash or output)
    line = last_line(output)
    return f"{text}; last line: {line}" if line else text


def last_line(output: str) -> str:
    """Return the last line that is not blank; with a crash report of Python, the last one before the report."""
    before = output.rpartition(_FATAL)[0] if _FATAL in output else output
    lines = [line.strip() for line in before.splitlines()]
    written = [line for line in lines if line]
    return written[-1][:_MAX_LINE] if written else ""


def crash_location(report: str) -> str:
    """Describe where Python crashed: the line of the cell, the library calls there, and the thread if it was another.

    Examples: `` at line 3 (ctypes string_at)`` (first and last function of the library), or `` at line 3, in another
    thread (queue get)``. Empty if the report does not say.
    """
    stacks = _crash_stacks(report.rpartition(_FATAL)[2] if _FATAL in report else "")
    for has_crashed, frames in stacks:
        # IPython's run_code calls the cell's own frame. That is the entry before it: the newest call comes first.
        at = next((i for i, (file, _, name) in enumerate(frames) if name == "run_code" and "IPython" in file), 0)
        if at:
            calls = _library_calls(frames[: at - 1])
            text = f" at line {frames[at - 1][1]}" + (f" ({' … '.join(calls)})" if calls else "")
            return text if has_crashed else text + _crashed_thread(stacks)
    return ""


def _crashed_thread(stacks: list[tuple[bool, Frames]]) -> str:
    """Describe the thread that crashed; it is not the one that runs the cell."""
    crashed = next((frames for has_crashed, frames in stacks if has_crashed), None)
    if crashed is None:
        return ", in a thread of C code"
    return ", in another thread" + (f" ({_function(crashed[0][0], crashed[0][2])})" if crashed else "")


def _library_calls(frames: Frames) -> list[str]:
    """Return the first library function that was called, and the last one if it is a different one."""
    inner = [(file, name) for file, _, name in reversed(frames)]
    calls = [_function(file, name) for file, name in inner if name not in _DECORATORS and _is_library(file)]
    return list(dict.fromkeys([*calls[:1], *calls[-1:]]))


def _crash_stacks(report: str) -> list[tuple[bool, Frames]]:
    """Parse each Python thread's stack: whether it crashed, and its frames; the one that crashed comes first.

    Python marks no thread if the crash was in one that runs no Python.
    """
    stacks: list[tuple[bool, Frames]] = []
    for line in report.splitlines():
        frame = _CRASH_FRAME.match(line)
        if _CRASH_STACK.match(line):
            stacks.append((line.startswith("Current"), []))
        elif frame and stacks:
            stacks[-1][1].append((frame["file"], int(frame["line"]), frame["name"]))
    return sorted(stacks, key=lambda stack: not stack[0])


def _is_library(file: str) -> bool:
    return not file.startswith("<") and "/axon_nb/" not in file


def _function(file: str, name: str) -> str:
    path = PurePath(file)
    return f"{path.parent.name if path.stem == '__init__' else path.stem} {name}"


class Place(NamedTuple):
    """A line of the user's code."""

    file: str
    """A path, or a cell such as ``Cell In[5]``."""
    line: int


def failure_line(error: RankError, cell: int) -> tuple[int, int] | None:
    """Return where a rank failed in a cell: the cell's innermost line and its outermost one; None: not in that cell.

    Args:
        error: The error with its traceback.
        cell: Number of the cell.
    """
    text = _ANSI.sub("", "\n".join(error.traceback))
    lines = [int(frame["line"]) for frame in _CELL_FRAME.finditer(text) if int(frame["cell"]) == cell]
    return (lines[-1], lines[0]) if lines else None


def failure_place(error: RankError, cell: int | None) -> Place | None:
    """Return the innermost line of the user's code at which a rank failed or waited; None: unknown.

    Args:
        error: The error.
        cell: Number of the cell; None: unknown.
    """
    text = _ANSI.sub("", "\n".join(error.traceback))
    for frame in reversed(list(_ANY_FRAME.finditer(text))):
        file = frame["cell"] or os.path.expanduser(frame["file"])
        if frame["cell"] or not library_of(file):
            return Place(file, int(frame["line"]))
    waited = _WAITED_AT.search(error.evalue) if error.kind in ("aborted", "stuck") else None
    return Place(f"Cell In[{cell}]", int(waited[1])) if waited and cell is not None else None


def next_commands(failure: Failure, ranks: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield the commands to run after a failure, each with what it does.

    Args:
        failure: What happened.
        ranks: The ranks that ran the cell.
    """
    kinds = {error.kind for error in failure.errors.values()}
    stuck = sorted(rank for rank, error in failure.errors.items() if error.kind == "stuck")
    if failure.explanation and (call := _WAITED_IN.search(failure.explanation)):
        yield f"%%distributed --break {call[1]}", f"in the cell, pauses each rank before {call[1]}, to see who comes"
        yield "%distributed help waiting-for", "explains hangs"
    elif failure.cause.kind == "raised":
        rank = failure.alike[0]
        yield f"%distributed debug --ranks {rank}", f"opens the debugger where rank {rank} failed"
        yield "%distributed vars", "shows the variables of all ranks, and which differ"
    if "died" in kinds and failure.kept.step is not None:
        yield "%distributed repair", "replaces dead ranks, and brings all ranks back to the last step that is kept"
    elif "died" in kinds:
        yield "%distributed repair", "replaces dead ranks; the new ones are empty"
        alive = next(
            (rank for rank in ranks if rank not in failure.errors or failure.errors[rank].kind != "died"), None
        )
        if alive is not None:
            yield f"%distributed repair --from {alive}", f"replaces them with the variables of rank {alive}"
    if stuck:
        yield "%distributed stacks", "shows where they are stuck"
        yield f"%distributed repair --ranks {format_ranks(stuck)}", "replaces them"


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
    if any(error.ename == "CheckpointException" for error in all_errors):
        hints.append(
            "`except Exception` does not catch a CheckpointException: catch "
            "`torch.distributed.checkpoint.api.CheckpointException`."
        )
    if any(_NO_COMPILER.search(error.evalue) for error in all_errors):
        hints.append("This cell compiles C++: install a compiler (`apt install g++`) and ninja (`pip install ninja`).")
    if {error.kind for error in all_errors} & {"died", "stuck"}:
        hints.append(remedy)
    if any(_NO_SHARED_MEMORY.search(error.evalue) for error in all_errors):
        hints.append(
            f"Shared memory is full: /dev/shm holds {_capacity('/dev/shm')}, and DataLoader workers and NCCL pass data "
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


def _capacity(folder: str) -> str:
    try:
        facts = os.statvfs(folder)
    except OSError:
        return "nothing"
    return format_bytes(facts.f_blocks * facts.f_frsize)


def shortage_hint(reports: Mapping[int, CellEnd]) -> str:
    """Return what filled the memory of a rank that ran out of it, and what would take less; empty if none did."""
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
    if first.into_shards:
        return (
            f"Hint: {name_ranks(ranks)} drew the same numbers into their shards, so the whole tensors repeat rows: run "
            "`%distributed seed 0 --per-rank`, then initialize again."
        )
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


def different_inputs_hint(reports: Mapping[int, CellEnd]) -> str:
    """Return where ranks that share a model first called it with different inputs, and the remedy; empty: nowhere.

    Args:
        reports: What each rank reported at the end of the cell.
    """
    found: dict[tuple[str, tuple[int, ...], int], dict[int, ModelCalls]] = {}
    for rank, end in sorted(reports.items()):
        for number, calls in enumerate(end.model_calls):
            found.setdefault((calls.model, calls.ranks, number), {})[rank] = calls
    for (model, ranks, _), by_rank in found.items():
        values: dict[tuple[str, int], list[NotedInput]] = {}
        for calls in by_rank.values():
            for one in calls.inputs:
                values.setdefault((one.module, one.call), []).append(one)
        equal: dict[str, int] = {}
        for (module, call), noted in values.items():
            numbers, norms = [each.number for each in noted], [each.norm for each in noted]
            if max(max(each) - min(each) for each in (numbers, norms)) <= _INPUT_TOLERANCE * max(norms):
                equal[module] = call
                continue
            what, first = f"{module} in {model}" if module else model, equal.get(module, 0) + 1
            since = f"since call {call}" if call == first else f"since one of the calls {first} to {call}"
            reason = ", though those of the model do not (unseeded dropout?)" if module else ""
            return (
                f"axon_nb: the inputs of {what} differ between {name_ranks(ranks)} {since}{noted[0].line}{reason}, so "
                "each rank computes a part of another result. Run `%distributed seed 0`, or torch.manual_seed(0) on "
                "all ranks, and pass the same inputs to all."
            )
    return ""


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
