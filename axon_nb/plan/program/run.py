"""`plan.run`: the user's own program on ranks that do not exist."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from axon_nb.errors import UsageError
from axon_nb.plan.arguments import check_callbacks, check_int, check_number
from axon_nb.plan.errors import PlanError
from axon_nb.plan.hardware.cards import CARDS
from axon_nb.plan.hardware.links import Link
from axon_nb.plan.hardware.presets import link_between, resolve_links, resolve_rates
from axon_nb.plan.hardware.rates import Rates
from axon_nb.plan.process.worker import Report, run_in_process
from axon_nb.plan.program.clock import LaneTimes, play
from axon_nb.plan.program.plan import ProgramPlan, planned_ranks
from axon_nb.plan.program.uniform import Lane
from axon_nb.plan.tables import format_flops
from axon_nb.records.ranks import format_ranks

_GIB = 1024**3
_CPU = "cpu"


def run(
    function: Callable[..., Any],
    world_size: int,
    *,
    device: str = "h100",
    args: Sequence[Any] = (),
    memory: float | None = None,
    rates: Rates | float | str | Any = None,
    links: Link | str | Any = None,
    overlap: float | None = None,
    ranks: str | Sequence[int] = "distinct",
    item: float | None = None,
    name: str | None = None,
    progress: Callable[[float, str], None] | None = None,
    cancel: threading.Event | None = None,
) -> ProgramPlan:
    """Run a program on ranks that do not exist: peak memory by line, collectives, and the time of a step.

        def train():
            model = DistributedDataParallel(Net().cuda())
            ...

        planned = plan.run(train, world_size=64, device="h100")
        planned.out_of_memory       # None, or the line that allocates past the card's memory

    A separate process runs the program on tensors without data, once for each kind of rank; nothing of it is left
    here, and what it prints is lost. It may do what programs for torchrun do: make groups and meshes, wrap models by
    DDP, `fully_shard` or `parallelize_module`, call collectives by hand. A virtual clock plays all ranks together:
    operations at the card's rates, calls on its links, in the order and on the streams that the program uses. CUDA's
    streams and events, including those of FSDP2, count; `torch.compile` is ignored.

    Args:
        function: The program; called with `args` on each rank, after `init_process_group`.
        world_size: Number of ranks.
        device: A GPU's name, such as ``"h100"``: its memory, rates and links are the defaults, its hosts hold 8. Or
            ``"cpu"``: CPU ranks with Gloo, without limits and rates.
        args: Arguments of the program.
        memory: GiB per rank; None: the card's.
        rates: The same as in `step_time`; None: the card's.
        links: One link for all groups: a `Link`, a preset's name, or the result of `calibrate`; None: the card's.
        overlap: Fraction of communication, 0 to 1, that computation beside it hides; None: as `calibrate` measured, or
            1.
        ranks: ``distinct``: one rank of each kind. The first three ranks and the last one along each axis of
            the program's groups run, and where they differ, ranks between them. ``all``; or rank numbers, the first of
            which stands for all others.
        item: What tensors answer to `.item()`, `float()` and `bool()`; None: this is an error, because there is no
            value.
        name: The name of the program in the result; None: the function's.
        progress: Called with the fraction done, 0 to 1, and the next step.
        cancel: Set it to cancel the plan.

    Raises:
        PlanError: the program failed, hangs, or reads a tensor's value; the message names ranks and lines.
        SimulatorError: the simulator process failed.
        PlanCancelledError: `cancel` was set.
        UsageError: an option is invalid; the message says what works.
    """
    check_callbacks(progress, cancel)
    if not callable(function):
        raise UsageError(f"plan.run needs a function that trains, such as `train`; got {type(function).__name__}.")
    size = check_int("world_size", world_size)
    card = CARDS.get(device.lower())
    if card is None and device.lower() != _CPU:
        raise UsageError(f"device must be one of {', '.join(CARDS)}, or cpu; got {device!r}.")
    speed = resolve_rates(rates) if rates is not None else None if card is None else card.rates
    limit = card.gib if memory is None and card is not None else memory
    if limit is not None:
        limit = _GIB * check_number("memory", limit, rule="GiB per rank, such as 80", least=1e-9)
    task = {
        "function": _pickled(function, args),
        "world_size": size,
        "is_gpu": card is not None,
        "ranks_per_host": size if card is None else card.gpus_per_host,
        "rates": speed,
        "memory": limit,
        "item": None if item is None else float(item),
        "ranks": _checked_ranks(ranks, size),
    }
    lanes = run_in_process(_simulate, cloudpickle.dumps(task), progress=progress, cancel=cancel)
    link = None if links is None else resolve_links(links, {"all": size})["all"]
    measured = getattr(rates, "overlap", 1.0) if overlap is None else overlap
    times = _played(
        lanes,
        lambda group: link if link is not None or card is None else link_between(card, group),
        issue_s=0.0 if speed is None else speed.issue_s,
        overlap=check_number("overlap", measured, rule="a fraction, 0 to 1", most=1.0),
        is_complete=isinstance(task["ranks"], str),
    )
    planned = tuple(planned_ranks(one, limit) for one in times)
    title = name or str(getattr(function, "__name__", "program"))
    notes = _notes(lanes, speed, ranks, [one.stuck_at for one in times])
    return ProgramPlan(title, size, device.lower(), limit, planned, tuple(notes), speed is not None)


def _played(lanes: Sequence[Lane], *args: Any, **options: Any) -> list[LaneTimes]:
    try:
        return play(lanes, *args, **options)
    except PlanError as error:
        if len(lanes) == sum(len(lane.ranks) for lane in lanes):
            raise
        raise PlanError(f"{error} One rank of each kind ran; ranks='all' runs each.") from error


def _pickled(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    try:
        return bytes(cloudpickle.dumps((function, tuple(args))))
    except Exception as error:
        raise PlanError(
            f"The program cannot be sent to another process ({error}): have it make what it needs instead of using "
            "open objects of the notebook."
        ) from error


def _checked_ranks(ranks: Any, size: int) -> str | tuple[int, ...]:
    if isinstance(ranks, str) and ranks in ("distinct", "all"):
        return ranks
    if isinstance(ranks, Sequence) and not isinstance(ranks, str) and ranks:
        numbers = tuple(check_int("ranks", rank, least=0) for rank in ranks)
        if max(numbers) < size:
            return numbers
    raise UsageError(f"ranks must be 'distinct', 'all' or numbers of the {size} ranks, such as [0, 1]; got {ranks!r}.")


def _notes(lanes: Sequence[Lane], rates: Rates | None, ranks: Any, stuck: Sequence[Any]) -> list[str]:
    notes = []
    if rates is not None:
        notes.append(f"Rates: {rates.source}. The clock is virtual; kernels of equal size take equally long.")
        if "float32" in rates.products and any("float32" in lane.record.dtypes for lane in lanes):
            notes.append(
                f"Products in float32 run at {format_flops(rates.products['float32'])}, because the program does not "
                "allow TF32: torch.set_float32_matmul_precision('high') does."
            )
    if ranks != "all" and len(lanes) < sum(len(lane.ranks) for lane in lanes):
        kinds = "; ".join(f"rank {lane.record.rank} stands for {format_ranks(lane.ranks)}" for lane in lanes[:4])
        more = f", and {len(lanes) - 4} more" if len(lanes) > 4 else ""
        notes.append(f"Ranks that do the same ran once: {kinds}{more}; ranks='all' runs each.")
    if lanes and all(lane.record.num_steps < 2 for lane in lanes):
        notes.append("The program takes fewer than two optimizer steps, so its step includes what is done before it.")
    for lane, place in zip(lanes, stuck, strict=True):
        if place is not None:
            notes.append(
                f"Rank {lane.record.rank} waits in line {place.line} for a call that none of the ranks that ran makes."
            )
    return notes


def _simulate(task: Mapping[str, Any], report: Report) -> list[Lane]:
    """Run the ranks, in the process that may import torch."""
    from axon_nb.plan.program.simulate import simulate

    return simulate(task, report)
