"""The exercises of notebook 02: the seven moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from axon_course.comparisons import first_difference
from axon_course.definitions import Exercise, Mistake, Property
from axon_course.trials import Trial
from axon_nb.comm.calls import calls

_SHAPES = ((1,), (8,), (4, 3))
_MESSAGES = frozenset({"send", "recv"})


def _on_rank(answer: Any, tensors: list[torch.Tensor]) -> tuple[Any, bool, tuple[str, ...], int, int]:
    """Return what the answer returned, whether its input is as before, which operations it called, messages, bytes."""
    tensor = tensors[dist.get_rank()]
    before = tensor.clone()
    with calls() as counted:
        found = answer(tensor)
    sent = counted.of("send")
    kept = bool(torch.equal(before, tensor))
    return found, kept, tuple(row.operation for row in counted.rows), sent.calls, sent.bytes


def _values(trial: Trial, tensors: list[torch.Tensor], ranks: int | None = None) -> list[Any]:
    return [found[0] for found in trial.run(_on_rank, tensors, ranks=ranks)]


def _made_of_messages(trial: Trial) -> str | None:
    for rank, (_, _, operations, messages, _) in enumerate(trial.run(_on_rank, trial.tensors(8))):
        if other := next((name for name in operations if name not in _MESSAGES), None):
            return f"rank {rank} called {other}; use only sends and receives"
        if not messages:
            return f"rank {rank} has sent nothing"
    return None


# ---- 2.1 -------------------------------------------------------------------------------------------------------------


def _gathers(trial: Trial, shape: tuple[int, ...], dtype: torch.dtype, ranks: int | None = None) -> str | None:
    size = ranks or trial.ranks
    tensors = [trial.tensors(*shape, text=str(rank))[0].to(dtype) for rank in range(size)]
    case = f"{dtype} of shape {shape}".removeprefix("torch.")
    return first_difference(_values(trial, tensors, ranks), [torch.stack(tensors)] * size, case)


def _in_rank_order(trial: Trial) -> str | None:
    return next(filter(None, (_gathers(trial, shape, torch.float64) for shape in _SHAPES)), None)


def _any_dtype(trial: Trial) -> str | None:
    return _gathers(trial, (3,), torch.int64) or _gathers(trial, (3,), torch.float32)


def _other_sizes(trial: Trial) -> str | None:
    for ranks in (2, 3, 5):
        if sentence := _gathers(trial, (2,), torch.float64, ranks):
            return f"{ranks} ranks, {sentence}"
    return None


def _gathered(trial: Trial, wrong: Callable[[int, list[torch.Tensor]], torch.Tensor]) -> bool:
    tensors = trial.tensors(8)
    expected = [wrong(rank, tensors) for rank in range(trial.ranks)]
    return first_difference(_values(trial, tensors), expected, "") is None


def _from_itself_on(rank: int, tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors[rank:] + tensors[:rank])


def _others_only(rank: int, tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([torch.zeros_like(part) if other == rank else part for other, part in enumerate(tensors)])


_ALL_GATHER = Exercise(
    id="2.1",
    title="All-gather out of messages",
    answer="my_all_gather",
    properties=(
        Property("all tensors, in rank order", _in_rank_order),
        Property("other dtypes", _any_dtype),
        Property("2, 3 and 5 ranks", _other_sizes, mock_only=True),
        Property("only sends and receives", _made_of_messages),
    ),
    mistakes=(
        Mistake(
            "The order differs by rank: each begins with its own tensor. Row 0 must be rank 0's on every rank.",
            lambda trial: _gathered(trial, _from_itself_on),
        ),
        Mistake(
            "A rank's own row is empty: nobody sends to itself, so it has to copy its own tensor.",
            lambda trial: _gathered(trial, _others_only),
        ),
        Mistake(
            "Everybody waits to receive, and nobody sends: one of the two must begin without waiting.",
            lambda trial: trial.hangs(_on_rank, trial.tensors(8)),
        ),
    ),
    hints=(
        "Each rank has to send its tensor to every other rank, and to receive one from every other rank.",
        "Begin all sends with `dist.isend`, which does not wait. Then receive into an empty tensor for each rank.",
        "Make `rows`, an empty tensor per rank; copy your own; `dist.recv(rows[other], src=other)`; stack them.",
    ),
)


# ---- 2.2 -------------------------------------------------------------------------------------------------------------


def _sums(trial: Trial, tensors: list[torch.Tensor], case: str, ranks: int | None = None) -> str | None:
    total = torch.stack(tensors).sum(dim=0).to(tensors[0].dtype)
    return first_difference(_values(trial, tensors, ranks), [total] * len(tensors), case)


def _equals_the_sum(trial: Trial) -> str | None:
    shapes = ((trial.ranks,), (2 * trial.ranks,), (trial.ranks, 3))
    cases = (_sums(trial, trial.tensors(*shape), f"shape {shape}") for shape in shapes)
    return next(filter(None, cases), None)


def _uneven_lengths(trial: Trial) -> str | None:
    lengths = (trial.ranks + 3, trial.ranks - 1, 1)
    cases = (_sums(trial, trial.tensors(length), f"{length} numbers on {trial.ranks} ranks") for length in lengths)
    return next(filter(None, cases), None)


def _whole_numbers(trial: Trial) -> str | None:
    return _sums(trial, [tensor.long() for tensor in trial.tensors(2 * trial.ranks)], "int64")


def _rings_of_other_sizes(trial: Trial) -> str | None:
    for ranks in (2, 3, 5):
        tensors = [trial.tensors(6, text=f"{ranks} {rank}")[0] for rank in range(ranks)]
        if sentence := _sums(trial, tensors, f"6 numbers on {ranks} ranks", ranks):
            return sentence
    return None


def _message_count(trial: Trial) -> str | None:
    right = 2 * (trial.ranks - 1)
    for rank, (*_, messages, _) in enumerate(trial.run(_on_rank, trial.tensors(8 * trial.ranks))):
        if messages != right:
            return f"rank {rank} sent {messages} messages; two laps of a ring of {trial.ranks} are {right}"
    return None


def _bytes_per_rank(trial: Trial) -> str | None:
    for length in (8 * trial.ranks, 8 * trial.ranks + 1):
        part = -(-length // trial.ranks) * 8
        limit = 2 * (trial.ranks - 1) * part
        for rank, (*_, sent) in enumerate(trial.run(_on_rank, trial.tensors(length))):
            if sent > limit:
                return f"{length} float64: rank {rank} sent {sent} bytes; a ring needs at most {limit}"
    return None


def _sent_whole(trial: Trial) -> bool:
    return all(sent >= (trial.ranks - 1) * 64 * 8 for *_, sent in trial.run(_on_rank, trial.tensors(64)))


def _one_sent_more(trial: Trial) -> bool:
    sent = [found[-1] for found in trial.run(_on_rank, trial.tensors(64))]
    return bool(max(sent) > 2 * min(sent))


def _is_mean(trial: Trial) -> bool:
    tensors = trial.tensors(8 * trial.ranks)
    return first_difference(_values(trial, tensors), [torch.stack(tensors).mean(dim=0)] * trial.ranks, "") is None


def _one_part_is_right(trial: Trial) -> bool:
    tensors = trial.tensors(8 * trial.ranks)
    total = torch.stack(tensors).sum(dim=0).chunk(trial.ranks)
    found = [value.chunk(trial.ranks) for value in _values(trial, tensors)]
    right = [[bool(torch.equal(part, sum_)) for part, sum_ in zip(parts, total, strict=True)] for parts in found]
    return all(sum(parts) == 1 for parts in right)


_RING = Exercise(
    id="2.2",
    title="A ring all-reduce",
    answer="ring_all_reduce",
    properties=(
        Property("equals the sum", _equals_the_sum),
        Property("lengths that ranks do not divide", _uneven_lengths),
        Property("whole numbers", _whole_numbers),
        Property("2, 3 and 5 ranks", _rings_of_other_sizes, mock_only=True),
        Property("only sends and receives", _made_of_messages),
        Property("messages per rank", _message_count),
        Property("bytes per rank", _bytes_per_rank),
    ),
    mistakes=(
        Mistake(
            "One rank sends much more than the others: it has become the boss, and everybody waits for it.",
            _one_sent_more,
        ),
        Mistake("Whole tensors travel. In a ring, each message is one part of a tensor.", _sent_whole),
        Mistake(
            "On each rank only one part is the sum: that was the first lap. The second lap hands the parts round.",
            _one_part_is_right,
        ),
        Mistake("This is the mean; all-reduce adds up.", _is_mean),
        Mistake(
            "Everybody waits to receive, and nobody sends: begin the send before you receive, without waiting for it.",
            lambda trial: trial.hangs(_on_rank, trial.tensors(8)),
        ),
    ),
    hints=(
        "Begin with a length that divides, and do only the first lap. Which part does rank 0 send, and which next?",
        (
            "In step s of the first lap, rank r sends part (r - s) mod n and adds what arrives to part (r - s - 1) "
            "mod n. In the second lap, it sends part (r + 1 - s) mod n and receives part (r - s) mod n. If the length "
            "does not divide, append zeros first, and cut them off at the end."
        ),
        (
            "One step: `sending = dist.isend(parts[(rank - step) % n], right)`, `dist.recv(incoming, left)`, "
            "`sending.wait()`, `parts[(rank - step - 1) % n].add_(incoming)`, with `parts = padded.chunk(n)`."
        ),
    ),
)


# ---- 2.3 -------------------------------------------------------------------------------------------------------------


def _passed_on(trial: Trial, ranks: int | None = None, **options: bool) -> str | None:
    size = ranks or trial.ranks
    tensors = [torch.full((3,), 10.0 * rank) for rank in range(size)]
    found = [value[0] for value in trial.run(_on_rank, tensors, ranks=ranks, **options)]
    return first_difference(found, [tensors[rank - 1] for rank in range(size)], f"{size} ranks")


def _nobody_waits_for_ever(trial: Trial) -> str | None:
    return _passed_on(trial, synchronous_sends=True)


def _odd_rings(trial: Trial) -> str | None:
    return next(filter(None, (_passed_on(trial, ranks, synchronous_sends=True) for ranks in (2, 3, 5))), None)


def _input_untouched(trial: Trial) -> str | None:
    kept = [found[1] for found in trial.run(_on_rank, trial.tensors(3))]
    return None if all(kept) else f"rank {kept.index(False)}: its own tensor has changed"


def _got_from_the_right(trial: Trial) -> bool:
    tensors = [torch.full((3,), 10.0 * rank) for rank in range(trial.ranks)]
    expected = [tensors[(rank + 1) % trial.ranks] for rank in range(trial.ranks)]
    return first_difference(_values(trial, tensors), expected, "") is None


def _hangs_only_without_buffers(trial: Trial) -> bool:
    tensors = trial.tensors(3)
    return not trial.hangs(_on_rank, tensors) and trial.hangs(_on_rank, tensors, synchronous_sends=True)


_PASS_RIGHT = Exercise(
    id="2.3",
    title="Pass to the right, and never wait for ever",
    answer="pass_right",
    properties=(
        Property("each gets its left neighbour's tensor", _passed_on),
        Property("a send waits for its receiver", _nobody_waits_for_ever),
        Property("2, 3 and 5 ranks", _odd_rings, mock_only=True),
        Property("its own tensor stays as it is", _input_untouched),
    ),
    mistakes=(
        Mistake(
            "All ranks send first. That works only as long as the messages are small enough to be stored on the way.",
            _hangs_only_without_buffers,
        ),
        Mistake(
            "All ranks receive first, and nobody is left to send.",
            lambda trial: trial.hangs(_on_rank, trial.tensors(3)),
        ),
        Mistake("This came from the right neighbour; it must come from the left.", _got_from_the_right),
        Mistake(
            "A rank received into the tensor that it had yet to send, and then passed on what it had received.",
            lambda trial: "changed" in (_input_untouched(trial) or ""),
        ),
    ),
    hints=(
        "If every rank begins with the same call, nobody is its partner. So they must not all begin in the same way.",
        "Some ranks send first, the others receive first. Who should be which, so that a sender's neighbour listens?",
        "Even ranks send first, odd ranks receive first. Receive into `torch.empty_like(tensor)`.",
    ),
)

EXERCISES = (_ALL_GATHER, _RING, _PASS_RIGHT)
