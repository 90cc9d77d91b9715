"""What `--hosts` accepts: how many hosts, how many ranks each gets, and on which address they join."""

from __future__ import annotations

import pytest

from axon_nb.cluster.launch.hosts import own_address, parse_hosts
from axon_nb.errors import UsageError


@pytest.mark.parametrize(
    ("text", "num_ranks", "counts"), [("join", 8, (4, 4)), ("join", 3, (2, 1)), ("join:2", 8, (3, 3, 2))]
)
def test_ranks_are_spread_over_hosts(text: str, num_ranks: int, counts: tuple[int, ...]) -> None:
    assert parse_hosts(text, num_ranks) == counts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b", "--hosts must be join, or join:2 for two other hosts; got a,b."),
        ("join:", "got join:."),
        ("join:0", "got join:0."),
        ("join:x", "got join:x."),
        ("join:8", "-n must be at least 9, one rank per host, with --hosts join:8; got 8."),
    ],
)
def test_bad_hosts_are_refused_with_the_fix(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_hosts(text, 8)
    assert message in str(caught.value)


def test_hosts_need_forked_ranks_and_an_interface() -> None:
    with pytest.raises(UsageError, match="it cannot be used with --engines ssh"):
        own_address(None, "join", "ssh")
    with pytest.raises(UsageError, match="--hosts join needs `--interface NAME`"):
        own_address(None, "join", "axon")
    assert own_address("lo", "join", "axon") == "127.0.0.1"
