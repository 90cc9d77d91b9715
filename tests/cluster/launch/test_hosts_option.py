"""What `--hosts` accepts: how many hosts, how many ranks each gets, and on which address they join."""

from __future__ import annotations

from pathlib import Path

import pytest

from axon_nb.cluster.launch.hosts import own_address, parse_hosts, ssh_command
from axon_nb.cluster.launch.placement import with_ray_options
from axon_nb.errors import UsageError
from axon_nb.host.ray import fit


@pytest.mark.parametrize(
    ("text", "num_ranks", "counts"),
    [
        ("join", 8, (4, 4)),
        ("join", 3, (2, 1)),
        ("join:2", 8, (3, 3, 2)),
        ("ssh:a,b", 8, (3, 3, 2)),
        ("ssh:a=4,b=4", 8, (0, 4, 4)),
        ("ssh:a=3,b=3", 8, (2, 3, 3)),
        ("ssh:a=2,b", 8, (3, 2, 3)),
    ],
)
def test_ranks_are_spread_over_hosts(text: str, num_ranks: int, counts: tuple[int, ...]) -> None:
    assert parse_hosts(text, num_ranks).counts == counts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b", "--hosts must be join, join:2, ssh:a,b, slurm, slurm:JOB, mpi:a,b, ray or ray:ADDRESS; got a,b."),
        ("slurm:", "got slurm:."),
        ("ray:a:1?gpus_per_rank=2", "--gpus-per-rank must be 0 or 1, as a rank uses one device; got 2."),
        ("ray:a:1?placement=none", "--placement must be pack or spread; got none."),
        ("ssh:", "--hosts ssh: needs host names, such as ssh:a,b; got ssh:."),
        ("ssh:-oX", "got ssh:-oX."),
        ("ssh:me@-oX", "got ssh:me@-oX."),
        ("ssh:me@", "got ssh:me@."),
        ("ssh:a,a", "--hosts ssh:a,a: a is listed twice."),
        ("mpi", "--hosts mpi: needs host names, such as mpi:a,b; got mpi."),
        ("mpi:a=2", "--hosts mpi: takes host names without numbers, such as mpi:a,b; got mpi:a=2."),
        ("ssh:a=9", "-n must be at least 9 with --hosts ssh:a=9, one rank per host; got 8."),
        ("join:", "got join:."),
        ("join:0", "got join:0."),
        ("join:x", "got join:x."),
        ("join:8", "-n must be at least 9 with --hosts join:8, one rank per host; got 8."),
    ],
)
def test_bad_hosts_are_refused_with_the_fix(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_hosts(text, 8)
    assert message in str(caught.value)


def test_hosts_need_forked_ranks_and_an_interface() -> None:
    with pytest.raises(UsageError, match="it cannot be used with --engines local"):
        own_address(None, parse_hosts("join", 2), "local")
    with pytest.raises(UsageError, match="--hosts join needs `--interface NAME`"):
        own_address(None, parse_hosts("join", 2), "axon")
    assert own_address("lo", parse_hosts("join", 2), "axon") == "127.0.0.1"


def test_address_that_leads_to_the_first_host_is_used_without_an_interface() -> None:
    assert own_address(None, parse_hosts("ssh:127.0.0.1", 2), "axon") == "127.0.0.1"
    with pytest.raises(UsageError, match=r"cannot resolve host.invalid .* Correct its name, or use `--interface NAME`"):
        own_address(None, parse_hosts("ssh:host.invalid", 2), "axon")


def test_ssh_without_names_uses_the_hosts_of_ipyparallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    with pytest.raises(UsageError, match=r"ipcluster_config.py, which lists none: use `--hosts ssh:NAME`"):
        parse_hosts("ssh", 8)
    (tmp_path / "profile_default").mkdir()
    (tmp_path / "profile_default" / "ipcluster_config.py").write_text(
        "c.SSHEngineSetLauncher.engines = {'a': 2, 'me@b': {'n': 3}}\nc.SSHLauncher.remote_python = '/far/python'\n"
    )
    option = parse_hosts("ssh", 8)
    assert (option.hosts, option.counts) == (("a", "me@b"), (3, 2, 3))
    command, python = ssh_command("me@b", "10.0.0.1:99")
    assert python == "/far/python"
    assert command[-2:] == ["me@b", "/far/python -P -m axon_nb.cli host --join 10.0.0.1:99 --read-key --name me@b"]


def test_configured_host_that_ssh_would_take_as_an_option_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    (tmp_path / "profile_default").mkdir()
    (tmp_path / "profile_default" / "ipcluster_config.py").write_text(
        "c.SSHEngineSetLauncher.engines = {'-oProxyCommand=touch x': 1}\n"
    )
    with pytest.raises(UsageError, match=r"lists '-oProxyCommand=touch x', which is not a host name: correct it"):
        parse_hosts("ssh", 8)


def test_options_of_ray_need_ray() -> None:
    assert with_ray_options("ray:a:1", 1, "spread") == "ray:a:1?gpus_per_rank=1&placement=spread"
    assert with_ray_options("ray", 0, None) == "ray:?gpus_per_rank=0"
    assert with_ray_options("slurm", None, None) == "slurm"
    with pytest.raises(UsageError, match="--gpus-per-rank and --placement are for --hosts ray"):
        with_ray_options("slurm", None, "pack")


@pytest.mark.parametrize(
    ("num_ranks", "gpus", "placement", "counts"),
    [
        (4, 0, "pack", [4]),
        (4, 0, "spread", [2, 1, 1]),
        (10, 0, "pack", [6, 3, 1]),
        (12, 0, "pack", []),
        (3, 1, "pack", [2, 1]),
        (3, 1, "spread", [2, 1]),
        (4, 1, "spread", []),
    ],
)
def test_ranks_go_where_ray_has_room(num_ranks: int, gpus: int, placement: str, counts: list[int]) -> None:
    free = [{"CPU": 3.5, "GPU": 1.0}, {"CPU": 6.0, "GPU": 0.0}, {"CPU": 2.0, "GPU": 4.0}, {"CPU": 0.0, "GPU": 0.0}]
    assert fit([{"free": one} for one in free], num_ranks, gpus, placement) == counts
