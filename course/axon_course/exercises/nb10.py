"""The exercises of notebook 10: which layout?"""

from __future__ import annotations

from typing import Any

from axon_course.definitions import Exercise, Mistake, Property
from axon_course.exercises.layouts import CASES, ProposedLayout
from axon_course.trials import Trial

_BYTES = 4


# ---- 10.1 ------------------------------------------------------------------------------------------------------------

_DIVIDING = ((64, 1), (64, 8), (7_100_000_000, 8), (7_100_000_000, 64))
_PADDED = ((7, 4), (1_000_003, 64))


def _states(parameters: int, ranks: int, stage: int, *, up: bool = True) -> int:
    share = -(-parameters // ranks) if up else parameters // ranks
    kept = [share if stage >= first else parameters for first in (3, 2, 1, 1)]
    return _BYTES * sum(kept)


def _holds(trial: Trial, stage: int, sizes: tuple[tuple[int, int], ...] = _DIVIDING) -> str | None:
    for parameters, ranks in sizes:
        got, right = _call(trial, parameters, ranks, stage), _states(parameters, ranks, stage)
        if got != right:
            return f"{parameters:,} parameters on {ranks} ranks, stage {stage}: got {got!r}; right is {right:,}"
    return None


def _call(trial: Trial, parameters: int, ranks: int, stage: int) -> Any:
    return trial.run(lambda answer: answer(parameters, ranks, stage), ranks=1)[0]


def _padded(trial: Trial) -> str | None:
    return next(filter(None, (_holds(trial, stage, _PADDED) for stage in range(4))), None)


def _returns(trial: Trial, wrong: Any) -> bool:
    cases = [(*size, stage) for size in _DIVIDING for stage in range(4)]
    return all(_call(trial, *case) == wrong(*case) for case in cases)


_STATES = Exercise(
    id="10.1",
    title="The bytes of a rank",
    answer="states_bytes",
    properties=(
        Property("stage 0: everything everywhere", lambda trial: _holds(trial, 0), mock_only=True),
        Property("stage 1: Adam's means are shared out", lambda trial: _holds(trial, 1), mock_only=True),
        Property("stage 2: gradients, too", lambda trial: _holds(trial, 2), mock_only=True),
        Property("stage 3: parameters, too", lambda trial: _holds(trial, 3), mock_only=True),
        Property("parameters that ranks do not divide", _padded, mock_only=True),
    ),
    mistakes=(
        Mistake(
            "This divides everything by the number of ranks in every stage; stages 0 to 2 keep something whole.",
            lambda trial: _returns(trial, lambda parameters, ranks, _: 4 * _BYTES * parameters // ranks),
        ),
        Mistake(
            "This counts one mean per parameter; Adam keeps two.",
            lambda trial: _returns(
                trial, lambda parameters, ranks, stage: _BYTES * sum(_parts(parameters, ranks, stage)[:3])
            ),
        ),
        Mistake(
            "This counts numbers, not bytes: a float32 takes four.",
            lambda trial: _returns(trial, lambda *case: _states(*case) // _BYTES),
        ),
        Mistake(
            "This rounds a share down; then some parameters would be on no rank at all.",
            lambda trial: all(
                _call(trial, *size, stage) == _states(*size, stage, up=False) for size in _PADDED for stage in range(4)
            ),
        ),
    ),
    hints=(
        "Write down four numbers per parameter: the parameter, its gradient, two means. Which of them are whole?",
        "Let `share` be the parameters of one rank, rounded up. Each of the four is either `share` or `parameters`.",
        "The means are `share` from stage 1 on, gradients from stage 2 on, parameters in stage 3. Add, times 4.",
    ),
)


def _parts(parameters: int, ranks: int, stage: int) -> list[int]:
    return [-(-parameters // ranks) if stage >= first else parameters for first in (3, 2, 1, 1)]


# ---- 10.2 to 10.4 ----------------------------------------------------------------------------------------------------


def _case_exercise(
    number: str, title: str, answer: str, mistakes: tuple[Mistake, ...], hints: tuple[str, str, str]
) -> Exercise:
    def looks(look: Any) -> Any:
        return lambda trial: look(ProposedLayout(number, trial.answer))

    return Exercise(
        id=number,
        title=title,
        answer=answer,
        properties=(
            Property("it has six names", looks(ProposedLayout.named), mock_only=True),
            Property("it uses all GPUs, and cuts the batch evenly", looks(ProposedLayout.uses_all), mock_only=True),
            Property("it fits", looks(ProposedLayout.fits), mock_only=True),
            Property("a step is within 10 % of the best", looks(ProposedLayout.is_fast), mock_only=True),
        ),
        mistakes=mistakes,
        hints=hints,
    )


_SMALL_CARDS = _case_exercise(
    "10.2",
    "Eight small cards",
    "small_cards",
    (
        Mistake(
            "Every rank keeps all model states, and they alone are four times the card. Something must be shared out.",
            lambda trial: trial.answer["strategy"] == "ddp" and trial.answer["dp"] == CASES["10.2"].num_gpus,
        ),
        Mistake(
            "The activations are kept. Recomputing them costs a third of the time, and here it is what makes room.",
            lambda trial: not trial.answer["activation_checkpointing"],
        ),
        Mistake(
            "Few microbatches make a long bubble, and each of them is large.",
            lambda trial: trial.answer["pp"] > 1 and trial.answer["num_microbatches"] < 32,
        ),
        Mistake(
            "Tensor parallelism sends every activation over PCIe, several times per block.",
            lambda trial: trial.answer["tp"] > 1,
        ),
    ),
    (
        "The states of 7.1 billion parameters, shared by eight, take 13 of the 24 GiB. What else must be small?",
        "Recompute activations. Then compare what FSDP gathers per layer with what a stage of a pipeline passes on.",
        "Eight stages send least over PCIe. With as many microbatches as samples, each is small and the bubble short.",
    ),
)
_SLOW_WIRES = _case_exercise(
    "10.3",
    "Slow wires",
    "slow_wires",
    (
        Mistake(
            "All 64 are one data axis, so every gradient and every gathered layer crosses the slow Ethernet.",
            lambda trial: trial.answer["dp"] == CASES["10.3"].num_gpus,
        ),
        Mistake(
            "Much of the traffic between hosts is that of data parallelism: with fewer copies there is less of it.",
            lambda trial: trial.answer["dp"] > 8,
        ),
        Mistake(
            "There is memory to spare, and this recomputes every activation: that costs a third of the computing.",
            lambda trial: trial.answer["activation_checkpointing"],
        ),
        Mistake(
            "Few microbatches: the stages wait for each other.",
            lambda trial: trial.answer["pp"] > 1 and trial.answer["num_microbatches"] < 16,
        ),
    ),
    (
        "What crosses between hosts: gradients (data), activations of every block (tensor), or of one cut (pipeline)?",
        "Keep tensor parallelism inside a host, put a pipeline between hosts, and keep few copies for data.",
        "Four copies. The other factor 16 is `tp` times `pp`, such as 8 × 2; then choose enough microbatches.",
    ),
)
_LONG_DOCUMENTS = _case_exercise(
    "10.4",
    "Long documents",
    "long_documents",
    (
        Mistake(
            "With 16,384 tokens one sample's activations take 69 GiB: no room is left for whole parameters.",
            lambda trial: trial.answer["dp"] == CASES["10.4"].num_gpus and trial.answer["strategy"] != "full_shard",
        ),
        Mistake(
            "It fits without recomputing, just so. Recomputing costs a third of the computing.",
            lambda trial: trial.answer["activation_checkpointing"],
        ),
        Mistake(
            "A pipeline with few microbatches has a long bubble, and a batch of 64 leaves few.",
            lambda trial: trial.answer["pp"] > 1,
        ),
        Mistake(
            "Tensor parallelism sends the activations, which are eight times as long now.",
            lambda trial: trial.answer["tp"] > 1,
        ),
    ),
    (
        "Activations grow with the context, model states do not. Which of the two is the problem now?",
        "64 samples, 64 GPUs: one each is the least that you can have. What do you shard so that it just fits?",
        "Shard everything (stage 3) over all 64, and see whether it fits without recomputing.",
    ),
)

EXERCISES = (_STATES, _SMALL_CARDS, _SLOW_WIRES, _LONG_DOCUMENTS)
