"""Every entry of the troubleshooting page is a message of the code, with a stable name that the message ends with."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import metadata

import pytest

from axon_nb import cli
from axon_nb.cluster.failures import RankError, cell_error
from axon_nb.errors import ClusterLostError, UsageError
from axon_nb.troubleshooting import MORE, PAGE, Entry, entries, explain, more, name_of
from axon_nb.wrong_numbers import faults_of
from scripts.generated_page import ROOT
from scripts.site_reference import template

ENTRIES = entries()


def example(entry: Entry) -> list[str]:
    """The lines of the message as the page shows it."""
    return entry.text.partition("```text\n")[2].partition("\n```\n")[0].splitlines()


@pytest.fixture(scope="module")
def texts() -> str:
    """All texts of the package, one per line, with `…` for what is inserted."""

    def all_texts() -> Iterator[str]:
        for folder in ("axon_nb", "magics"):
            for path in (ROOT / folder).rglob("*.py"):
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    if isinstance(node, ast.JoinedStr | ast.Constant):
                        yield template(node).replace("\n", " ")

    return "\n".join(all_texts())


def test_every_heading_is_an_entry() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert len(ENTRIES) == page.count("\n### ") >= 25
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_entry_is_a_message_of_the_code(entry: Entry, texts: str) -> None:
    assert entry.pattern.search(texts)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_entry_shows_its_message_as_it_looks(entry: Entry) -> None:
    lines = example(entry)
    assert name_of("\n".join(lines)) == entry.name
    assert [line for line in lines if line.startswith(MORE)] in ([], more("\n".join(lines)))


def test_stale_messages_are_detected(texts: str) -> None:
    assert not Entry("fishing", "The cluster … has gone fishing", "").pattern.search(texts)


def test_errors_end_with_the_name_of_their_entry() -> None:
    lost = ClusterLostError("The cluster 'digits' lost its host agent.")
    assert lost._render_traceback_()[-1] == "More: `%distributed help cluster-gone`"
    assert ClusterLostError("Nobody explains this.")._render_traceback_() == ["ClusterLostError: Nobody explains this."]


def test_errors_of_usage_are_one_line() -> None:
    assert len(UsageError("The cluster 'digits' is in use by another notebook.")._render_traceback_()) == 1


def test_a_failed_cell_points_to_one_entry() -> None:
    killed = {rank: RankError(rank, "died", "", "was killed by SIGKILL") for rank in (0, 1)}
    report = cell_error(killed, first=[0], hint="Run `%distributed repair`.")._render_traceback_()
    assert [line for line in report if line.startswith(MORE)] == report[-1:] == ["More: `%distributed help died`"]
    shown = ("CollectiveMismatchError: …", "More: `%distributed help collective-mismatch`")
    differs = {0: RankError(0, "raised", "CollectiveMismatchError", "Collective mismatch: …", shown)}
    assert "\n".join(cell_error(differs, first=[0])._render_traceback_()).count(MORE) == 1


def test_what_user_code_raises_is_not_looked_up() -> None:
    text = "the hero was killed by a dragon"
    error = {0: RankError(0, "raised", "RuntimeError", text, (f"RuntimeError: {text}",))}
    assert MORE not in "\n".join(cell_error(error, first=[0])._render_traceback_())


def test_entries_are_found_by_name_by_message_and_by_words() -> None:
    by_name = explain(["died"])
    assert "`%distributed repair --from 0` replaces" in by_name
    assert "```" not in by_name
    assert explain(["Rank", "3", "was", "killed", "by", "SIGSEGV", "at", "line", "2"]) == by_name
    assert explain(["SIGSEGV"]) == by_name
    assert len(explain(["GPU"]).splitlines()) > 3
    assert explain(["unicorn"]).startswith("No entry contains 'unicorn'.")


def test_wrong_numbers_are_those_of_the_installed_torch() -> None:
    shown = explain(["wrong-numbers"])
    assert f"torch {metadata.version('torch')}, which is installed:" in shown
    assert all(str(fault) in shown for fault in faults_of(metadata.version("torch")))


@pytest.mark.parametrize("words", [["help", "died"], ["help", "was", "killed", "by"]])
def test_the_program_explains_a_message(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    assert "SIGSEGV" in capsys.readouterr().out
