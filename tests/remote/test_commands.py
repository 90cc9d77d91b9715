"""`axon-nb status`, `run` and so on, on a live cluster of another program; replies of tools are cut to a size."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from axon_nb.records.commands import ErrorCode
from axon_nb.remote.commands import REMOTE_COMMANDS
from axon_nb.remote.tools import within
from tests.doctor.command import ROOT, axon_nb
from tests.remote.conftest import Owner

SCHEMA = json.loads((ROOT / "axon_nb" / "records" / "cell_result.schema.json").read_text(encoding="utf-8"))


@contextlib.contextmanager
def shared(owner: Owner) -> Iterator[Owner]:
    """The program allows changes meanwhile."""
    owner.share(True)
    try:
        yield owner
    finally:
        owner.share(False)


def test_hang_is_seen_from_outside_while_the_cell_runs(owner: Owner) -> None:
    owner.hang()
    try:
        why = owner.json("explain")
        assert (why["kind"], why["waited_for"]) == ("slow", "1")
        assert why["verdict"].startswith("Waiting for rank 1 (line 2): ranks 0,2 have been in all_reduce at line 4")
        states = {row["rank"]: row["state"] for row in owner.json("status")["ranks"]}
        assert "all_reduce" in states[0]
        groups = owner.json("stacks", "--ranks", "0-1")["groups"]
        assert any(frame["code"] == "while not done_waiting():" for group in groups for frame in group["frames"])
        names = owner.json("vars")
        assert not names["compared"]
        assert "done_waiting" in [row["name"] for row in names["variables"]]
        owner.share(True)
        assert owner.error("run", "print(1)")[:2] == (5, "busy")
    finally:
        owner.share(False)
        owner.release()
    assert owner.script.value("h.result().ok") is True, "those who look do not disturb the cell"


def test_cell_runs_and_streams_lines(owner: Owner) -> None:
    with shared(owner):
        code, lines = owner.lines("run", "seen = rank // 2\nprint(seen)")
        assert code == 0
        assert [line["event"] for line in lines] == ["started", "output", "output", "result"]
        assert [(line["ranks"], line["text"]) for line in lines[1:3]] == [("0-1", "0\n"), ("2", "1\n")]
        jsonschema.validate(lines[-1]["result"], SCHEMA)
        assert owner.json("pull", "seen")["groups"] == [{"ranks": "0-1", "value": 0}, {"ranks": "2", "value": 1}]
        owner.json("push", "rate=0.5", "sizes=[1, 2]", "--ranks", "0")
        assert owner.json("pull", "[rate, sizes]", "--ranks", "0")["groups"] == [{"ranks": "0", "value": [0.5, [1, 2]]}]
    (row,) = (row for row in owner.json("vars")["variables"] if row["name"] == "seen")
    assert row["ranks"] == "differs on rank 2"


def test_failed_cell_has_status_1_and_a_cause(owner: Owner) -> None:
    with shared(owner):
        code, lines = owner.lines("run", "if rank == 2:\n    1 / 0\ndist.all_reduce(torch.ones(2))")
    assert code == 1
    cause = lines[-1]["result"]["cause"]
    assert (cause["ranks"], cause["type"], cause["line"]) == ("2", "ZeroDivisionError", 2)
    assert owner.json("explain")["last_result"]["cause"] == cause


def test_interrupt_ends_a_cell(owner: Owner) -> None:
    owner.hang()
    assert owner.json("interrupt")["ranks"] == "0-2"
    owner.script.ok("h.wait(60)")
    assert owner.json("explain")["last_result"]["state"] == "interrupted"


def test_logs_have_the_last_output(owner: Owner) -> None:
    with shared(owner):
        owner.lines("run", "print('line of', rank)")
    assert "line of 2" in {group["text"].strip() for group in owner.json("logs")["output"]}


def test_what_changes_something_needs_permission(owner: Owner) -> None:
    for words in (["run", "print(1)"], ["push", "a=1"], ["pull", "rank"], ["repair"]):
        status, code, message = owner.error(*words)
        assert (status, code) == (4, "refused")
        assert "config share=on" in message


def test_renamed_cluster_has_its_new_name_everywhere(owner: Owner) -> None:
    assert owner.error("rename", "physics")[1] == "refused"
    owner.share(on=True)
    try:
        assert owner.json("rename", "physics") == {"name": "physics"}
        assert owner.json("status", "physics")["name"] == "physics"
        assert owner.error("status", "lab")[1] == "no_cluster"
        assert owner.json("rename", "lab", "--cluster", "physics") == {"name": "lab"}
    finally:
        owner.share(on=False)


def test_bad_input_is_one_error_with_a_code(owner: Owner) -> None:
    assert owner.error("status", "nobody") == (
        3,
        "no_cluster",
        "There is no cluster 'nobody' on this host; running are lab.",
    )
    assert owner.error("stacks", "--ranks", "7")[:2] == (2, "bad_request")
    assert owner.error("status", "--frce")[:2] == (2, "bad_request")
    assert owner.error("push", "a")[:2] == (2, "bad_request")
    text = owner.command("status", "nobody")
    assert (text.code, text.out, text.err.count("\n")) == (3, "", 1)


def test_no_cluster_is_an_error(tmp_path: Path) -> None:
    done = axon_nb("status", "--json", AXON_NB_RUNTIME_DIR=str(tmp_path))
    assert (done.code, done.json()["error"]["code"]) == (3, "no_cluster")


@pytest.mark.parametrize("word", REMOTE_COMMANDS)
def test_help_names_the_exit_statuses(word: str) -> None:
    for code in ErrorCode:
        assert f"{code.exit_status} " in REMOTE_COMMANDS[word].description


LARGE = {
    "verdict": "Waiting for rank 1",
    "ranks": [{"rank": rank, "state": "waiting in all_reduce " * 5} for rank in range(1024)],
    "text": "\n".join(f"line {number}" for number in range(5000)),
}


def test_small_reply_stays_as_it_is() -> None:
    assert within({"verdict": "x"}, 500) == {"verdict": "x"}


@pytest.mark.parametrize("characters", [500, 2000, 8000, 50_000])
def test_large_reply_is_cut_and_says_so(characters: int) -> None:
    cut = within(LARGE, characters)
    assert len(json.dumps(cut)) <= characters
    assert cut["cut"] is True
    assert cut["verdict"] == LARGE["verdict"]
    assert cut["ranks"][0]["rank"] == 0
    assert cut["text"].endswith("line 4999"), "the end of a text says more than its start"


def test_reply_of_many_parts_names_them() -> None:
    assert within({f"key{number}": "x" * 100 for number in range(8)}, 200) == {
        "cut": True,
        "keys": [f"key{number}" for number in range(8)],
    }
