"""A slice of the fuzz on two hosts; `make fuzz HOSTS=1 FAULTS=300` runs more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.launch.hosts.ssh_server import why_no_ssh
from tests.fuzz.faults import make_fault
from tests.fuzz.hosts.rounds import HOST_KINDS, KINDS_OF_TWO_HOSTS, FuzzOnTwoHosts, fuzz_on_two_hosts

SEED = 20
ROUNDS = 6
"""Of all kinds, after one of each kind that needs two hosts."""


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzOnTwoHosts]:
    """One kernel with ranks on two hosts, which keep their models through all rounds."""
    if reason := why_no_ssh():
        pytest.skip(reason)
    with fuzz_on_two_hosts(SEED, tmp_path_factory.mktemp("fuzz")) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", HOST_KINDS)
def test_ranks_of_two_hosts_stay_usable_after_a_fault_of_a_host(fuzz: FuzzOnTwoHosts, kind: str) -> None:
    outcome = fuzz.round(list(HOST_KINDS).index(kind), kinds=(kind,))
    assert not outcome.problems, str(outcome)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ranks_of_two_hosts_stay_usable_after_random_faults(fuzz: FuzzOnTwoHosts) -> None:
    failed = [str(outcome) for outcome in map(fuzz.round, range(ROUNDS)) if outcome.problems]
    assert not failed, "\n\n".join(failed)


def test_run_of_300_rounds_covers_every_kind_and_every_way_to_lose_a_host() -> None:
    faults = [make_fault(SEED, number, table=KINDS_OF_TWO_HOSTS) for number in range(300)]
    assert {fault.kind for fault in faults} >= {*KINDS_OF_TWO_HOSTS}
    assert {"cut for good", "long cut"} <= {fault.kind for fault in faults}
    assert {(fault.other_host, fault.silently) for fault in faults if "cut" in fault.other_host} >= {
        (what, silently) for what in ("short cut", "long cut", "cut for good") for silently in (False, True)
    }
