"""A fixed slice of the fuzz; `make fuzz` runs as many faults as there is time for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.fault import COLLECTIVES
from tests.fuzz.faults import ADVERSARY, KINDS, LOSSES, POINTS, make_fault
from tests.fuzz.figures import RECORD, figures_folder
from tests.fuzz.rounds import SENT, Fuzz

SEED = 20
LONG = 200
EVERY_KIND = [pytest.param(kind, marks=[pytest.mark.slow] if kind in LOSSES else []) for kind in KINDS]
"""A lost kernel, agent or controller is also tested in `tests/kernel` (`test_kills.py`, `test_attach.py`)."""


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzz]:
    """One kernel, whose 4 ranks keep their models through all rounds."""
    with Fuzz(SEED, tmp_path_factory.mktemp("fuzz")) as running:
        yield running


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_ranks_stay_usable_after_a_fault(fuzz: Fuzz, kind: str) -> None:
    outcome = fuzz.round(list(KINDS).index(kind), kinds=(kind,))
    assert not outcome.problems, str(outcome)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ranks_stay_usable_after_hundreds_of_faults(fuzz: Fuzz) -> None:
    failed = [str(outcome) for outcome in map(fuzz.round, range(LONG)) if outcome.problems]
    assert not failed, "\n\n".join(failed)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ranks_stay_usable_after_hundreds_of_adversarial_faults(fuzz: Fuzz) -> None:
    rounds = (fuzz.round(number, kinds=ADVERSARY) for number in range(LONG))
    failed = [str(outcome) for outcome in rounds if outcome.problems]
    assert not failed, "\n\n".join(failed)


def test_rounds_are_reproducible_by_seed() -> None:
    assert [make_fault(3, n) for n in range(50)] == [make_fault(3, n) for n in range(50)]


def test_long_run_covers_every_fault_kind_and_place() -> None:
    long = [make_fault(SEED, number) for number in range(1000)]
    assert {fault.kind for fault in long} == set(KINDS)
    details = " | ".join(fault.detail for fault in long)
    assert [name for name in (*COLLECTIVES, *POINTS) if name not in details] == []


def test_cells_sent_cover_every_collective() -> None:
    text = "".join(path.read_text() for path in SENT)
    assert all(f'"{name}": ' in text for name in COLLECTIVES)


def test_only_long_complete_runs_write_the_record() -> None:
    assert figures_folder(1000, all_kinds=True) == RECORD
    assert RECORD not in {figures_folder(999, all_kinds=True), figures_folder(1000, all_kinds=False)}


def test_published_record_is_of_a_long_run() -> None:
    (total,) = [
        line for line in (Path(__file__).parents[2] / RECORD / "fuzz.md").read_text().splitlines() if "| all |" in line
    ]
    assert int(total.split("|")[2]) >= 1000
