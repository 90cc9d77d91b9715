"""The card of a failed cell, and the reports of `watch_numbers` and `--compare`."""

from __future__ import annotations

import base64
import math
import re
from html import unescape
from html.parser import HTMLParser

from axon_nb.cluster.branches import Branch, Branches
from axon_nb.cluster.comparison import Finding, Verdict
from axon_nb.cluster.divergence import NumbersFinding, NumbersVerdict
from axon_nb.cluster.failures import Failure, Kept, RankError, cell_error, failure_line
from axon_nb.widgets.reports import branches_bundle, comparison_bundle, divergence_bundle, failure_card

CODE = """# %%distributed
x = torch.ones(3)
def step(y):
    return y @ torch.ones(4)
if rank == 1:
    z = step(x) + 1
dist.barrier()"""
TRACEBACK = (
    "\x1b[31mRuntimeError\x1b[39m                   Traceback (most recent call last)",
    "\x1b[36mCell\x1b[39m\x1b[36m \x1b[39m\x1b[32mIn[7]\x1b[39m\x1b[32m, line 6\x1b[39m\n----> 6     z = step(x) + 1",
    "\x1b[36mCell\x1b[39m\x1b[36m \x1b[39m\x1b[32mIn[7]\x1b[39m\x1b[32m, line 4\x1b[39m, in \x1b[36mstep\x1b[39m(y)\n",
)
RAISED = RankError(1, "raised", "RuntimeError", "sizes <3> and 4 differ", TRACEBACK)
WAITED = RankError(0, "aborted", "", "waited in barrier at line 7")

DIFFERS = NumbersFinding(
    "weight", "0.bias", where="line 4", optimizer=0, step=3, problem="differs", ranks=(1,), others=(0, 2), can_undo=True
)
WRONG = Finding("0", "Linear", "the output", "forward", 0, (1,), 0.1, 1e-6, "scaled", "Use `world_size`, not <2>.")


class Words(HTMLParser):
    """The text of a page, and what of it is marked; a script is an error."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.marked: list[str] = []
        self._is_marked = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag not in ("script", "img", "iframe")
        self._is_marked = tag == "mark"

    def handle_endtag(self, tag: str) -> None:
        self._is_marked = False

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._is_marked:
            self.marked.append(data)


def card(
    *errors: RankError,
    explanation: str = "",
    hint: str = "",
    code: str = CODE,
    ranks: int = 3,
    kept: Kept | None = None,
) -> Words:
    by_rank = {error.rank: error for error in errors}
    failure = cell_error(by_rank, first=[errors[0].rank], explanation=explanation, hint=hint, kept=kept).failure
    assert isinstance(failure, Failure)
    return Words(failure_card(failure, code=code, cell=7, ranks=range(ranks)))


def test_cause_comes_first_with_the_user_line() -> None:
    shown = card(RAISED, WAITED)
    assert shown.text[:2] == ["Rank 1 raised RuntimeError", "sizes <3> and 4 differ"]
    assert shown.marked == ["return y @ torch.ones(4)"]
    assert "called at line 6" in shown.text
    assert failure_line(RAISED, 7) == (4, 6)
    assert failure_line(RAISED, 8) is None


def test_each_rank_has_its_fate() -> None:
    text = " ".join(card(RAISED, WAITED).text)
    assert "rank 0 waited in barrier at line 7" in text
    assert "rank 2 finished the cell" in text
    assert "All ranks keep their variables." in text
    assert "%distributed debug --ranks 1" in text


def test_ranks_that_share_a_fate_share_a_row_in_the_plural() -> None:
    interrupted = [RankError(rank, "aborted", "", "was interrupted at line 5") for rank in (0, 2)]
    text = " ".join(card(RAISED, *interrupted).text)
    assert "ranks 0,2 were interrupted at line 5" in text


def test_title_counts_all_ranks_that_failed() -> None:
    other = RankError(2, "raised", "ValueError", "odd")
    assert card(RAISED, other, WAITED).text[0] == "Rank 1 raised RuntimeError; rank 2 failed, too"


def test_names_in_the_error_are_highlighted() -> None:
    traceback = ("Cell In[7], line 2",)
    error = RankError(0, "raised", "NameError", "name 'batches' is not defined", traceback)
    shown = card(error, code="# %%distributed\nfor x in batches: y = batches_of(x)", ranks=1)
    assert shown.marked == ["batches"]
    plain = card(error, code="a = 1\nb = batches", ranks=1)
    assert "a = 1" in "".join(plain.text), "the first line of a cell without a magic is code"


def test_deadlock_names_every_rank() -> None:
    errors = [RankError(rank, "aborted", "", f"waited in recv at line {rank + 2}") for rank in range(4)]
    text = " ".join(card(*errors, explanation="Ranks 0 and 1 wait for each other.", ranks=4).text)
    assert "Ranks 0 and 1 wait for each other." in text
    assert all(f"rank {rank} waited in recv at line {rank + 2}" in text for rank in range(4))


def test_deadlock_marks_the_call_and_says_who_did_not_join() -> None:
    code = "# %%distributed\ntotal = torch.ones(1)\nif rank != 2:\n    dist.all_reduce(total)"
    errors = [RankError(rank, "aborted", "", "waited in all_reduce at line 4") for rank in (0, 1, 3)]
    why = "ranks 0-1,3 wait in all_reduce at line 4 for rank 2, which has finished the cell."
    shown = card(*errors, explanation=why, code=code, ranks=4)
    text = " ".join("".join(shown.text).split())
    assert shown.marked == ["dist.all_reduce"]
    assert "if rank != 2:" in text
    assert "Ranks 0-1,3 wait in all_reduce at line 4" in text
    assert "finished the cell, and did not join all_reduce at line 4" in text
    assert "%%distributed --break all_reduce" in text


def test_mismatch_without_a_traceback_has_its_lines() -> None:
    why = "Size mismatch: rank 1 passed 20 bytes to broadcast at line 6, rank 0 passed 16 bytes to barrier at line 4."
    code = "# %%distributed\na = 1\nif rank:\n    dist.barrier()\nelse:\n    dist.broadcast(x, 0)"
    errors = [RankError(rank, "aborted", "", "waited in a collective") for rank in range(2)]
    assert card(*errors, explanation=why, code=code, ranks=2).marked == ["dist.barrier", "dist.broadcast"]


def test_dead_rank_card_offers_replacement() -> None:
    died = RankError(2, "died", "", "was killed by SIGKILL")
    text = " ".join(card(died, WAITED, hint="Run `%distributed repair` to replace it.").text)
    assert text.count("killed") == 2, "once above, once in the table"
    assert text.startswith("Rank 2 was killed by SIGKILL")
    assert "The variables of rank 2 are lost; all other ranks keep theirs." in text
    assert "%distributed repair --from 0" in text


def test_card_of_a_protected_rank_names_the_step_that_is_kept() -> None:
    died = RankError(2, "died", "", "was killed by SIGKILL")
    text = " ".join(card(died, WAITED, kept=Kept(text="Kept: the state of all ranks at step 15.", step=15)).text)
    assert "Kept: the state of all ranks at step 15." in text
    assert "lost" not in text
    assert "--from" not in text, "the new ranks are not empty"
    nothing = Kept(text="Nothing of rank 2 is kept. `%distributed config protect=on` keeps each step of all ranks.")
    text = " ".join("".join(card(died, WAITED, kept=nothing).text).split())
    assert "Nothing of rank 2 is kept. %distributed config protect=on keeps each step" in text
    assert "All other ranks keep their variables." in text


def test_reports_of_ranks_are_escaped() -> None:
    hostile = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    error = RankError(0, "raised", hostile, hostile, ("Cell In[7], line 2",))
    shown = card(error, RankError(1, "aborted", "", hostile), hint=hostile, code=f"# %%distributed\n{hostile}")
    assert re.sub(r"\s", "", "".join(shown.text)).count(re.sub(r"\s", "", unescape(hostile))) >= 4


def test_key_error_is_named_with_its_key() -> None:
    assert card(RankError(1, "raised", "KeyError", "2")).text[:2] == ["Rank 1 raised KeyError", "KeyError: 2"]


def test_commands_in_advice_are_code() -> None:
    for bundle, code in (
        (divergence_bundle(NumbersVerdict(DIFFERS, 4, (0, 1, 2), 4)), "%distributed undo"),
        (comparison_bundle(Verdict(WRONG, {}, (), ())), "world_size"),
    ):
        page = bundle["text/html"]
        assert f">{code}</code>" in page
        assert "`" not in page
        assert f"`{code}`" in bundle["text/plain"]
    assert "not &lt;2&gt;." in page


def test_first_differences_say_each_fact_once() -> None:
    report = Finding("0", "Linear", "the output", "forward", 0, (1,), 0.1, 2.3e-05, "", "No usual cause fits.")
    words = Words(comparison_bundle(Verdict(report, {"the outputs": (4, 1)}, (), ()))["text/html"]).text
    text = " ".join(words)
    assert text.startswith("All ranks compared with one rank First difference: the output of 0 (Linear).")
    assert "rounding explains 2e-05 at most" in text
    assert text.count("No usual cause fits.") == text.count("rank 1") == text.count("cause") == 1
    words = Words(divergence_bundle(NumbersVerdict(DIFFERS, 4, (0, 1, 2), 4))["text/html"]).text
    assert "".join(words).count("0.bias") == 1


def test_curves_keep_the_scale_of_the_runs_that_stay_finite() -> None:
    def run(value: str, *losses: float) -> Branch:
        return Branch(value, "ok", curves={"loss": tuple(enumerate(losses))})

    good, poor = run("0.1", 10.0, 1.0, 0.1), run("0.01", 10.0, 8.0, 6.0)
    diverged = run("9", 10.0, 1e5, 1e30, math.nan)
    page = branches_bundle(Branches("lr", [good, poor, diverged], kept="0.1"))["text/html"]
    alone = branches_bundle(Branches("lr", [good, poor]))["text/html"]
    curves, drawn_alone = (re.findall(r'<img alt="([^"]*)" src="([^"]*)"', text) for text in (page, alone))
    assert curves[:2] == drawn_alone
    assert curves[2][0] == "loss from 10 to nan"
    drawn = base64.b64decode(curves[2][1].partition(",")[2]).decode()
    assert "<path" in drawn, "the arrow where it leaves"
    assert len(re.findall(r"[\d.]+,[\d.]+", drawn.partition("points=")[2].partition("fill")[0])) == 2, "it ends there"
    assert ">diverged<" in page
    assert '✓ 0.1</th><td style="' in page
    assert '<b style="font-weight:600">finished, kept</b>' in page
