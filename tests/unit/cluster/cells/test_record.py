"""The record of a cell for programs: it follows its schema, names the cause and its line, and stays small."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, cast

import jsonschema
import pytest

from axon_nb.cluster.cells.result import MAX_RECORD_BYTES, CellResult, cell_record
from axon_nb.cluster.cells.run import CellRun
from axon_nb.cluster.failures import RankError, cell_error, interrupt_error
from axon_nb.errors import CellError, CellInterrupt

SCHEMA = json.loads((files("axon_nb") / "records" / "cell_result.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
TRACEBACK = (
    "\x1b[31mIndexError\x1b[39m                   Traceback (most recent call last)",
    "\x1b[36mCell\x1b[39m\x1b[36m \x1b[39m\x1b[32mIn[7]\x1b[39m\x1b[32m, line 3\x1b[39m\n----> 3 total = f(scales)",
    "\x1b[36mFile\x1b[39m\x1b[36m \x1b[39m\x1b[32m/home/ada/scaling.py:12\x1b[39m, in \x1b[36mf\x1b[39m(x)\n     11 \n",
)
RAISED = RankError(3, "raised", "IndexError", "list index out of range", TRACEBACK)


@dataclass
class FinishedRun:
    """What of a run its record needs."""

    ranks: list[int]
    errors: Mapping[int, RankError] = field(default_factory=dict)
    explanation: str = ""
    number: int | None = 7

    @property
    def cell(self) -> FinishedRun:
        return self

    @property
    def seconds(self) -> dict[int, float]:
        return {rank: 0.25 * rank for rank in self.ranks}


def record(run: FinishedRun, failure: BaseException | None = None) -> dict[str, Any]:
    made = cell_record(cast(CellRun, run), failure)
    VALIDATOR.validate(made)
    assert len(json.dumps(made)) <= MAX_RECORD_BYTES
    return made


def failed(*errors: RankError, explanation: str = "", ranks: int = 4, timeout_s: float | None = None) -> dict[str, Any]:
    by_rank = {error.rank: error for error in errors}
    error = cell_error(by_rank, first=[errors[0].rank], explanation=explanation, timeout_s=timeout_s)
    return record(FinishedRun([*range(ranks)], by_rank, explanation), error)


def test_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_cell_that_worked() -> None:
    made = record(FinishedRun([0, 1, 2, 3]))
    assert (made["state"], made["cell"], made["ranks"], made["seconds"]) == ("ok", 7, "0-3", 0.75)
    assert (made["cause"], made["next"], made["verdict"]) == (None, [], "")
    assert made["groups"] == [{"ranks": "0-3", "did": "finished", "text": ""}]
    assert CellResult(record=made).to_dict() == made


def test_cause_has_the_innermost_line_of_user_code() -> None:
    made = failed(RAISED, *(RankError(rank, "aborted", "", "waited in all_reduce at line 4") for rank in range(3)))
    assert made["state"] == "failed"
    cause = made["cause"]
    assert (cause["ranks"], cause["type"], cause["message"]) == ("3", "IndexError", "list index out of range")
    assert (cause["file"], cause["line"]) == ("/home/ada/scaling.py", 12)
    assert {"ranks": "0-2", "did": "aborted", "text": "waited in all_reduce at line 4"} in made["groups"]
    assert made["next"][0]["command"] == "%distributed debug --ranks 3"


def test_deadlock_has_a_verdict_and_where_the_ranks_waited() -> None:
    why = "Ranks 0-1 wait in barrier at line 5 for rank 2, which has finished the cell."
    made = failed(*(RankError(rank, "aborted", "", "waited in barrier at line 5") for rank in (0, 1)), explanation=why)
    assert made["verdict"] == why
    assert (made["cause"]["file"], made["cause"]["line"]) == ("Cell In[7]", 5)
    assert {group["did"] for group in made["groups"]} == {"aborted", "finished"}


def test_timeout_and_interrupt_are_states() -> None:
    assert failed(RankError(0, "aborted", "", "was interrupted"), timeout_s=2.0)["state"] == "timed_out"
    assert record(FinishedRun([0, 1]), interrupt_error({}, [0, 1]))["state"] == "interrupted"


@pytest.mark.parametrize("letter", ["x", "\N{SNOWMAN}", '"'])
def test_large_failures_are_cut(letter: str) -> None:
    errors = [RankError(rank, "raised", f"Error{rank}", letter * 10_000, TRACEBACK) for rank in range(0, 256, 2)]
    made = failed(*errors, explanation=letter * 9_000, ranks=256)
    assert made["groups"][-1]["did"] == "other"
    assert made["cause"]["message"].endswith("…")


def test_errors_without_a_cell_follow_the_schema() -> None:
    for error in (CellError("The ranks stopped."), CellInterrupt("No rank stopped.")):
        VALIDATOR.validate(error.to_dict())
        assert error.to_dict()["verdict"] == str(error)
