"""A whole session of IPython in a terminal: cells, failures, views as text, Ctrl-C, the debugger, the end."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.front_ends.terminal import Terminal
from tests.support.cell_output import by_rank
from tests.support.processes import until


def said(shown: str) -> dict[int, list[str]]:
    """The lines of each rank; the first one stands behind the last prompt."""
    return by_rank(shown.replace("...: ", "\n"))


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """A session with 2 ranks."""
    with Terminal(tmp_path_factory.mktemp("terminal")) as session:
        session.run("%load_ext axon_nb")
        started = session.run("%distributed start -n 2 --name here")
        assert "here: running, 2 ranks, shared memory" in started
        yield session


def test_cells_print_and_give_values(terminal: Terminal) -> None:
    shown = terminal.run("%%distributed\nx = torch.ones(2) * rank\nprint('sum', float(x.sum()))\nrank * 10")
    for line in ("[rank 0] sum 0.0", "[rank 1] sum 2.0", "[rank 0] 0", "[rank 1] 10"):
        assert f"{line}\n" in shown
    assert "[rank 1] tensor([1., 1.])\n" in terminal.run("%%rank 1\nx")
    awaiting = "%%distributed\nimport asyncio\nawait asyncio.sleep(0)\nprint('slept')"
    assert said(terminal.run(awaiting)) == {0: ["slept"], 1: ["slept"]}


def test_failure_shows_the_ranks_traceback(terminal: Terminal) -> None:
    shown = terminal.run("%%distributed\ny = 1\nif rank:\n    y / 0\ndist.barrier()")
    assert "[rank 1]" in shown
    assert "ZeroDivisionError: division by zero" in shown
    assert "[rank 0] waited in barrier at line 5" in shown
    assert "site-packages" not in shown
    assert said(terminal.run("%%distributed\nprint(y)")) == {0: ["1"], 1: ["1"]}


def test_views_are_text(terminal: Terminal) -> None:
    terminal.run("%%distributed\nmodel = torch.nn.Linear(8, 4)")
    before = len(terminal.text)
    shown = terminal.run("%%distributed --watch --time\ndist.barrier()\nmodel(torch.ones(8)).sum().backward()")
    assert "slowest: rank" in shown
    said_of = {
        "%shards model": "weight",
        "%memory model": r"\n  rank 1: .*estimate: ",
        "%watch": r"2 ranks, no cell is running(?s:.*)\n  rank 1: idle; ",
        "%timeline": r"\n  rank 1: ",
        "%distributed status": r"\n +1 .* cpu +idle ",
        "%distributed vars": "model",
    }
    for magic, words in said_of.items():
        # A busy rank may answer too late, and is shown the next time.
        assert until(lambda magic=magic, words=words: re.search(words, terminal.run(magic))), terminal.text
    for wrong in ("Traceback", "Error", "Widget(", "View(", "Strip("):
        assert wrong not in terminal.text[before:]


def test_data_is_pushed_and_pulled(terminal: Terminal) -> None:
    terminal.run("sent = [1, 2, 3]")
    terminal.run("%push sent")
    terminal.run("%%distributed\nsent = sent[rank]")
    terminal.run("%pull sent --as back")
    assert "{0: 1, 1: 2}" in terminal.run("back")


def test_help_is_text(terminal: Terminal) -> None:
    shown = terminal.run("%distributed start?")
    assert "number of ranks" in shown
    assert "%distributed start -n 4" in shown
    assert "did you mean `%distributed status`?" in terminal.run("%distributed statsu")


def test_ctrl_c_aborts_only_the_cell(terminal: Terminal) -> None:
    since = terminal.submit("%%distributed\nprint('begun', rank, flush=True)\nimport time\ntime.sleep(600)")
    for rank in range(2):
        terminal.wait_for(f"[rank {rank}] begun {rank}", since=since)
    terminal.press_ctrl_c()
    assert "Ranks 0-1 stopped." in terminal.collect(since)
    assert said(terminal.run("%%distributed\nprint('al' + 'ive')")) == {0: ["alive"], 1: ["alive"]}


def test_debugger_reads_from_the_terminal(terminal: Terminal) -> None:
    terminal.run("%%distributed\ndef inner(secret):\n    raise ValueError(secret)\nif rank:\n    inner(41)")
    since = terminal.submit("%distributed debug")
    asked = terminal.wait_for("ipdb rank 1> ", since=since)
    terminal.type("p secret + 1\n")
    terminal.wait_for("ipdb rank 1> ", since=asked)
    terminal.type("q\n")
    assert "\n42\n" in terminal.collect(since)


def test_auto_mode_and_local_cells(terminal: Terminal) -> None:
    terminal.run("%distributed auto on")
    assert "[rank 1] 3\n" in terminal.run("rank + 2")
    assert "On ranks 0-1" in terminal.run("print('seen')")
    assert "False" in terminal.run("%%local\n'rank' in globals()")
    terminal.run("%distributed auto off")
    assert "True" in terminal.run("'rank' not in globals()")


def test_exit_stops_the_ranks(terminal: Terminal) -> None:
    assert terminal.leave() == 0
    assert until(lambda: not terminal.left())
