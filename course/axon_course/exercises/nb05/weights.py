"""Exercises 5.2 and 5.3: weights that are whole for a moment, or on one rank."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

from axon_course.comparisons import difference, first_difference
from axon_course.definitions import Exercise, Mistake, Property
from axon_course.memory import PeakBytes
from axon_course.trials import Trial
from axon_nb.comm.calls import calls
from axon_nb.records.units import format_bytes

_TOLERANCE = 1e-9
_WIDTH, _LAYERS = 32, 8


# ---- 5.2 -------------------------------------------------------------------------------------------------------------


def _cut(weight: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    flat = weight.flatten()
    length = -(-len(flat) // ranks)
    return list(torch.cat([flat, flat.new_zeros(length * ranks - len(flat))]).view(ranks, length).clone())


def _forward_on_rank(answer: Any, cuts: list[list[torch.Tensor]], shapes: list[torch.Size], x: torch.Tensor) -> Any:
    return answer([pieces[dist.get_rank()] for pieces in cuts], shapes, x)


def _network(trial: Trial, widths: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = trial.generator(f"network {widths}")
    pairs = itertools.pairwise(widths)
    weights = [torch.randint(-3, 4, (after, before), generator=generator).double() for before, after in pairs]
    return weights, torch.randint(-3, 4, (3, widths[0]), generator=generator).double()


def _forward(trial: Trial, widths: list[int]) -> tuple[list[Any], torch.Tensor]:
    weights, x = _network(trial, widths)
    expected = x
    for weight in weights:
        expected = torch.relu(expected @ weight.T)
    shapes = [weight.shape for weight in weights]
    return trial.run(_forward_on_rank, [_cut(weight, trial.ranks) for weight in weights], shapes, x), expected


def _forward_equals(trial: Trial, widths: list[int], case: str) -> str | None:
    found, expected = _forward(trial, widths)
    return first_difference(found, [expected] * trial.ranks, case, tolerance=_TOLERANCE)


def _one_layer(trial: Trial) -> str | None:
    n = trial.ranks
    return _forward_equals(trial, [2, n], f"one weight of shape {n} x 2")


def _several_layers(trial: Trial) -> str | None:
    n = trial.ranks
    return _forward_equals(trial, [n, 2 * n, n, 3 * n], "three layers")


def _padded_layers(trial: Trial) -> str | None:
    return _forward_equals(trial, [3, 5, 7], "weights of 15 and 35 numbers")


def _peak_on_rank(answer: Any, cuts: list[list[torch.Tensor]], shapes: list[torch.Size], x: torch.Tensor) -> int:
    peak = PeakBytes()
    with peak:
        _forward_on_rank(answer, cuts, shapes, x)
    return peak.bytes


def _peak(trial: Trial) -> float:
    """The most that a rank has kept at a time, in whole layers."""
    weights, x = _network(trial, [_WIDTH] * (_LAYERS + 1))
    shapes = [weight.shape for weight in weights]
    peaks = trial.run(_peak_on_rank, [_cut(weight, trial.ranks) for weight in weights], shapes, x)
    return float(max(peaks)) / weights[0].nbytes


def _drops_layers(trial: Trial) -> str | None:
    peak = _peak(trial)
    if peak < 4:
        return None
    return f"{_LAYERS} layers: at the worst moment, a rank had {peak:.1f} layers' worth of numbers; 3 are enough"


SHARDED_FORWARD = Exercise(
    id="5.2",
    title="Gather, compute, drop",
    answer="sharded_forward",
    properties=(
        Property("one layer", _one_layer),
        Property("several layers", _several_layers),
        Property("numbers that ranks do not divide", _padded_layers),
        Property("layers are dropped", _drops_layers, mock_only=True),
    ),
    mistakes=(
        Mistake(
            (
                "All layers are whole at the same time: they were gathered first, or kept after use. Then nothing was"
                " saved."
            ),
            lambda trial: _peak(trial) >= _LAYERS,
        ),
        Mistake(
            "The pieces are in the wrong order. Piece r comes from rank r, whichever rank looks.",
            lambda trial: (
                "has shape" not in (sentence := _several_layers(trial) or "")
                and "rank 0" not in sentence
                and bool(sentence)
            ),
        ),
        Mistake(
            (
                "The zeros that fill the last pieces were taken for weights: cut them off before you give the row its"
                " shape."
            ),
            lambda trial: not _several_layers(trial) and "shape" in _error_of(trial),
        ),
    ),
    hints=(
        (
            "Begin with one layer: how does each rank get all pieces of it? Then put the pieces in a row, and give "
            "them the weight's shape."
        ),
        (
            "`dist.all_gather(pieces, shard)` fills a list of empty tensors, one from each rank. `torch.cat(pieces)` "
            "makes a row, perhaps with zeros at its end: a weight has `shape.numel()` numbers."
        ),
        (
            "In a loop over layers: gather, `torch.cat(pieces)[: shape.numel()].view(shape)`, compute, and `del` "
            "pieces and weight before the next layer comes."
        ),
    ),
)


def _error_of(trial: Trial) -> str:
    try:
        return _padded_layers(trial) or ""
    except RuntimeError as error:
        return str(error)


# ---- 5.3 -------------------------------------------------------------------------------------------------------------


def _saved_on_rank(answer: Any, pieces: list[dict[str, torch.Tensor]]) -> Any:
    return answer(pieces[dist.get_rank()])


def _pieces(trial: Trial) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    rows = {"up.weight": trial.tensors(6, text="up"), "down.weight": trial.tensors(3, text="down")}
    by_rank = [{name: parts[rank] for name, parts in rows.items()} for rank in range(trial.ranks)]
    return by_rank, {name: torch.cat(parts) for name, parts in rows.items()}


def _saved(trial: Trial) -> tuple[list[Any], dict[str, torch.Tensor]]:
    pieces, whole = _pieces(trial)
    return trial.run(_saved_on_rank, pieces), whole


def _none_waits(trial: Trial) -> str | None:
    _saved(trial)
    return None


def _rank_0_has_all(trial: Trial) -> str | None:
    found, whole = _saved(trial)
    if not isinstance(found[0], dict) or found[0].keys() != whole.keys():
        return f"rank 0 must return a dictionary with the names {', '.join(whole)}"
    wrong = ((name, difference(found[0][name], row)) for name, row in whole.items())
    return next((f"{name}: rank 0 {words}" for name, words in wrong if words), None)


def _others_none(trial: Trial) -> str | None:
    found, _ = _saved(trial)
    wrong = next((rank for rank in range(1, trial.ranks) if found[rank] is not None), None)
    return None if wrong is None else f"rank {wrong} returned something; only rank 0 saves, the others return None"


def _sent_on_rank(answer: Any, pieces: list[dict[str, torch.Tensor]]) -> tuple[int, int]:
    with calls() as counted:
        _saved_on_rank(answer, pieces)
    return counted.sent, sum(piece.nbytes for piece in pieces[dist.get_rank()].values())


def _sends_once(trial: Trial) -> str | None:
    for rank, (sent, own) in enumerate(trial.run(_sent_on_rank, _pieces(trial)[0])):
        if sent > own:
            return f"rank {rank} sent {format_bytes(sent)}; it has {format_bytes(own)}, and only rank 0 needs them"
    return None


SAVING = Exercise(
    id="5.3",
    title="One saves, all take part",
    answer="whole_weights",
    properties=(
        Property("no rank waits for ever", _none_waits),
        Property("rank 0 has the whole rows", _rank_0_has_all),
        Property("the others return None", _others_none),
        Property("each piece is sent once", _sends_once, mock_only=True),
    ),
    mistakes=(
        Mistake(
            "Only some ranks take part in the meeting. Those that do wait for the others, which have gone on.",
            lambda trial: trial.hangs(_saved_on_rank, _pieces(trial)[0]),
        ),
        Mistake(
            (
                "Every rank gets the whole model, and all but one throw it away. On a real model, they would run out "
                "of memory."
            ),
            lambda trial: not _rank_0_has_all(trial) and bool(_sends_once(trial)),
        ),
        Mistake(
            "This is rank 0's own piece: the others' pieces are missing.",
            lambda trial: all(
                torch.equal(_saved(trial)[0][0][name], piece) for name, piece in _pieces(trial)[0][0].items()
            ),
        ),
    ),
    hints=(
        "There is a collective that collects tensors on one rank: `dist.gather`. Which ranks must call it?",
        (
            "All ranks call `dist.gather(shard, pieces, dst=0)`. Only rank 0 has a list of empty `pieces`; the others"
            " pass `None`."
        ),
        (
            "Loop over `shards.items()` on every rank, and gather each. On rank 0, `torch.cat(pieces)` is the "
            "whole row. Return the dictionary on rank 0 only."
        ),
    ),
)
