"""Where ranks are placed: on which hosts, GPUs and instances, or refused with what is possible."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from axon_nb.cluster.launch.hosts import own_address, parse_hosts, ssh_command
from axon_nb.cluster.launch.placement import (
    Layout,
    explain_number,
    interface_ip,
    place_ranks,
    plan_layout,
    rank_environment,
    with_scheduler_options,
)
from axon_nb.errors import StartError, UsageError
from axon_nb.host.resources import usable_cores
from axon_nb.host.schedulers.ray import fit
from axon_nb.records.hooks import Verdict
from axon_nb.records.protocol.agent import EngineInfo
from axon_nb.records.protocol.wire import own_version
from tests.support.nvidia_smi import A100X4, MIG, Driver
from tests.support.script import Script

CORES = usable_cores()
FEW = min(4, max(2, CORES))
"""Ranks that share one card, or the CPU, when nobody says how many."""

# There is no card here: the ranks compute on the CPU, and the layout is that of two instances.
PLAN = """
import axon_nb
from axon_nb.cluster.launch.placement import Layout
from axon_nb.cluster.session import clusters
clusters.plan_layout = lambda *_, **__: Layout(2, "gloo", ("cpu", "cpu"), "MIG-a,MIG-b", 1, (), ("MIG-a", "MIG-b"))
"""
SEEN = "import os\nos.environ['CUDA_VISIBLE_DEVICES']"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A machine with four cards, of which number 1 is in use."""
    driver = Driver(tmp_path, monkeypatch)
    driver.prints(A100X4)
    return driver


@pytest.fixture
def no_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without cards."""
    Driver(tmp_path, monkeypatch).prints("")


@pytest.mark.usefixtures("no_cards")
def test_environment_variable_selects_cpu_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AXON_NB_CPU_BACKEND", "gloo")
    assert plan_layout(2).backend == "gloo"
    assert plan_layout(2, backend="shm").backend == "shm"
    monkeypatch.setenv("AXON_NB_CPU_BACKEND", "mpi")
    with pytest.raises(UsageError, match="AXON_NB_CPU_BACKEND must be shm or gloo; got mpi"):
        plan_layout(2)


@pytest.mark.usefixtures("no_cards")
def test_ranks_use_cpus_without_gpus() -> None:
    layout = plan_layout(3)
    assert (layout.num_ranks, layout.backend, layout.devices) == (3, "shm", ("cpu",) * 3)
    assert layout.visible is None
    assert layout.threads == max(1, CORES // 3)
    assert layout.notes == ()


@pytest.mark.usefixtures("no_cards")
def test_default_is_2_to_4_ranks() -> None:
    layout = plan_layout(None)
    assert layout.num_ranks == min(4, max(2, CORES))
    assert re.fullmatch(rf"\d ranks for {CORES} CPU cores? .*; `-n` chooses another number\.", explain_number(layout))


@pytest.mark.usefixtures("no_cards")
def test_100_ranks_get_one_thread_each() -> None:
    assert plan_layout(100).threads == 1
    assert plan_layout(2, threads=5).threads == 5


def test_each_free_gpu_gets_a_rank(driver: Driver) -> None:
    layout = plan_layout(None)
    assert (layout.num_ranks, layout.backend) == (3, "nccl")
    assert layout.devices == ("cuda:0", "cuda:1", "cuda:2")
    assert layout.visible == "0,2,3"
    assert layout.notes == ("Skipping GPU 1 (in use); pass `--devices 1` to use it anyway.",)
    assert explain_number(layout) == "3 ranks, one for each free GPU."


def test_busy_gpu_is_used_if_named(driver: Driver) -> None:
    layout = plan_layout(None, devices="1")
    assert (layout.num_ranks, layout.devices, layout.visible, layout.notes) == (1, ("cuda:0",), "1", ())


def test_named_gpus_keep_their_order(driver: Driver) -> None:
    layout = plan_layout(2, devices="3,0")
    assert (layout.devices, layout.visible, layout.backend) == (("cuda:0", "cuda:1"), "3,0", "nccl")


def test_fewer_ranks_than_gpus(driver: Driver) -> None:
    layout = plan_layout(2)
    assert (layout.devices, layout.backend) == (("cuda:0", "cuda:1"), "nccl")


def test_more_ranks_than_gpus_share_them_over_gloo_with_a_note(driver: Driver) -> None:
    layout = plan_layout(5, devices="0,2")
    assert layout.devices == ("cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0")
    assert layout.backend == "gloo"
    assert layout.notes == ("5 ranks share 2 GPUs (Gloo).",)
    assert plan_layout(2, devices="0").notes == ("2 ranks share 1 GPU (Gloo).",)


def test_gloo_can_be_requested(driver: Driver) -> None:
    layout = plan_layout(None, backend="gloo")
    assert (layout.num_ranks, layout.backend, layout.devices[0]) == (3, "gloo", "cuda:0")


def test_requesting_cpus_hides_the_gpus(driver: Driver) -> None:
    layout = plan_layout(None, devices="cpu")
    assert (layout.backend, set(layout.devices), layout.visible) == ("shm", {"cpu"}, "")


def test_gpus_hidden_by_the_user_stay_hidden(driver: Driver) -> None:
    driver.shows("3,1,2")
    layout = plan_layout(None)
    assert (layout.num_ranks, layout.visible) == (2, "3,2")
    with pytest.raises(UsageError, match="GPU 0 is not visible here; visible: 3, 1, 2"):
        plan_layout(1, devices="0")
    driver.shows("")
    assert plan_layout(2).devices == ("cpu", "cpu")
    with pytest.raises(UsageError, match="visible: none"):
        plan_layout(1, devices="0")


def test_ranks_see_the_mig_instance(driver: Driver) -> None:
    driver.prints(A100X4, listing=MIG)
    name = "MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d"
    driver.shows(name)
    layout = plan_layout(None)
    assert (layout.num_ranks, layout.backend, layout.visible) == (FEW, "gloo", name)
    layout = plan_layout(1)
    assert (layout.backend, layout.devices, layout.visible) == ("nccl", ("cuda:0",), name)
    assert plan_layout(2).notes == ("2 ranks share 1 GPU (Gloo).",)
    assert plan_layout(1, devices=name) == plan_layout(1, devices="1") == layout
    with pytest.raises(UsageError, match=f"GPU MIG-x is not visible here; visible: {name}"):
        plan_layout(1, devices="MIG-x")
    with pytest.raises(UsageError, match="is listed twice"):
        plan_layout(1, devices=f"1,{name}")


SEVEN = "GPU 0: NVIDIA H100 (UUID: GPU-0)\n" + "".join(
    f"  MIG 1g.10gb     Device  {number}: (UUID: MIG-{number})\n" for number in range(7)
)


def test_seven_mig_instances_give_seven_ranks(driver: Driver) -> None:
    driver.prints("0, GPU-0, NVIDIA H100, 81920, 70000\n", listing=SEVEN)
    layout = plan_layout(None)
    assert (layout.num_ranks, layout.backend, set(layout.devices)) == (7, "gloo", {"cuda:0"})
    seen = [rank_environment(layout, rank)["CUDA_VISIBLE_DEVICES"] for rank in range(7)]
    assert seen == [f"MIG-{number}" for number in range(7)]
    assert layout.notes == ("7 ranks use 7 MIG instances, one each (Gloo).",)
    assert plan_layout(None, devices=layout.visible or "") == plan_layout(None, devices="0") == layout  # as a restart
    more = plan_layout(9)
    assert [more.visible_to(rank) for rank in (6, 7, 8)] == ["MIG-6", "MIG-0", "MIG-1"]
    assert more.notes == ("9 ranks share 7 MIG instances (Gloo).",)
    assert plan_layout(2).notes == ("2 of 7 MIG instances are used (Gloo).",)
    with pytest.raises(UsageError, match="NCCL does not connect MIG instances"):
        plan_layout(None, backend="nccl")
    assert plan_layout(None, backend="nccl", devices="MIG-3").visible == "MIG-3"


def test_single_gpu_gives_several_ranks_with_a_note(driver: Driver) -> None:
    driver.prints("0, GPU-0, NVIDIA GeForce RTX 4060 Laptop GPU, 8188, 4\n")
    layout = plan_layout(None)
    assert (layout.num_ranks, layout.backend, set(layout.devices)) == (FEW, "gloo", {"cuda:0"})
    assert layout.notes == (f"{FEW} ranks share 1 GPU (Gloo). Use `-n 1` for one rank, on NCCL.",)
    assert plan_layout(1).backend == plan_layout(None, backend="nccl").backend == "nccl"


def test_busy_gpus_fall_back_to_cpus_with_a_note(driver: Driver) -> None:
    driver.shows("1")
    layout = plan_layout(2)
    assert (layout.backend, layout.devices, layout.visible) == ("shm", ("cpu", "cpu"), "")
    assert "Skipping GPU 1 (in use)" in layout.notes[0]


REFUSED = [
    ({"n": 0}, "-n must be at least 1; got 0."),
    ({"n": -3}, "-n must be at least 1; got -3."),
    ({"n": 1, "backend": "mpi"}, "--backend must be one of auto, shm, gloo, nccl; got mpi."),
    ({"n": 1, "devices": ""}, "must be `auto`, `cpu` or GPU numbers"),
    ({"n": 1, "devices": "gpu0"}, "must be `auto`, `cpu` or GPU numbers"),
    ({"n": 1, "devices": "0,,2"}, "must be `auto`, `cpu` or GPU numbers"),
    ({"n": 1, "devices": "-1"}, "must be `auto`, `cpu` or GPU numbers"),
    ({"n": 1, "devices": "²"}, "must be `auto`, `cpu` or GPU numbers"),
    ({"n": 1, "devices": "4"}, "GPU 4 is not visible here; visible: 0, 1, 2, 3"),
    ({"n": 2, "devices": "2,2"}, "GPU 2 is listed twice"),
    ({"n": 4, "backend": "nccl"}, "there are 4 ranks and 3 free GPUs. Use `-n 3` or `--backend gloo`"),
    ({"n": 1, "backend": "nccl", "devices": "cpu"}, "NCCL needs GPUs, and none is free here"),
    (
        {"n": 2, "backend": "shm", "several_hosts": True},
        "--backend shm is for the ranks of one host; use `--backend gloo` with several.",
    ),
]


@pytest.mark.parametrize(("wish", "sentence"), REFUSED, ids=[str(wish) for wish, _ in REFUSED])
def test_impossible_placement_is_rejected_with_alternatives(
    driver: Driver, wish: dict[str, object], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        plan_layout(**wish)  # type: ignore[arg-type]
    assert sentence in str(caught.value)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    used=st.lists(st.integers(0, 2000), max_size=5),
    n=st.none() | st.integers(1, 9),
    backend=st.sampled_from(["auto", "shm", "gloo", "nccl"]),
)
def test_every_placement_is_consistent(driver: Driver, used: list[int], n: int | None, backend: str) -> None:
    driver.prints("".join(f"{i}, GPU-{i:08d}-0, Card, 16384, {mib}\n" for i, mib in enumerate(used)))
    free = [i for i, mib in enumerate(used) if mib <= 512]
    try:
        layout = plan_layout(n, backend=backend)
    except UsageError:
        assert backend == "nccl"
        assert len(free) < (n or len(free) or 1)
        return
    assert len(layout.devices) == layout.num_ranks == (n or (len(free) if len(free) > 1 else layout.num_ranks))
    assert layout.threads >= 1
    assert [int(card) for card in (layout.visible or "").split(",") if card] == free
    places = [int(device.removeprefix("cuda:")) for device in layout.devices if device != "cpu"]
    assert set(places) <= set(range(len(free)))
    assert bool(places) == bool(free)
    if layout.backend == "nccl":
        assert len(set(places)) == layout.num_ranks
    if backend == "auto":
        assert (layout.backend == "nccl") == (bool(free) and len(free) >= layout.num_ranks)


def test_interface_is_given_by_name_or_address() -> None:
    assert interface_ip("lo") == interface_ip("127.0.0.1") == "127.0.0.1"
    with pytest.raises(UsageError, match=r"--interface nonesuch: this host has no such interface or address"):
        interface_ip("nonesuch")


def test_several_hosts_require_num_ranks() -> None:
    with pytest.raises(UsageError, match="Several hosts need `-n`"):
        plan_layout(None, several_hosts=True)
    with pytest.raises(UsageError, match="--devices must be auto or cpu with ranks on several hosts; got 0,1"):
        plan_layout(2, devices="0,1", several_hosts=True)


def _places(*hosts: str, gpus: int = 0) -> list[EngineInfo]:
    return [EngineInfo(host, 1, 6, gpus, own_version(), Verdict("", "", 0.0, ())) for host in hosts]


def test_placements_follow_the_hosts() -> None:
    layout = Layout(3, "nccl", ("cuda:0",) * 3, None, 1)
    found = place_ranks(layout, _places("a", "b", "a", gpus=2))
    shown = [(s.local_rank, s.local_world_size, s.node_rank, s.device, s.threads) for s in found]
    assert shown == [(0, 2, 0, "cuda:0", 3), (0, 1, 1, "cuda:0", 6), (1, 2, 0, "cuda:1", 3)]
    with pytest.raises(StartError, match="a has 2 ranks and 1 GPU"):
        place_ranks(layout, _places("a", "b", "a", gpus=1))
    assert place_ranks(layout, _places("a", "b", "a", gpus=2), threads_per_rank=2)[1].threads == 2


def test_ranks_that_are_all_on_one_other_host_use_all_its_gpus() -> None:
    layout = Layout(2, "nccl", ("cuda:0",) * 2, None, 1, hosts=("a", "a"))
    assert [s.device for s in place_ranks(layout, _places("a", "a", gpus=2))] == ["cuda:0", "cuda:1"]


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
        (
            "a,b",
            "--hosts must be join, join:2, ssh:a,b, slurm, slurm:JOB, mpi:a,b, ray, ray:ADDRESS, k8s or k8s:NAMESPACE",
        ),
        ("slurm:", "got slurm:."),
        ("ray:a:1?gpus_per_rank=2", "--gpus-per-rank must be 0 or 1, as a rank uses one device; got 2."),
        ("ray:a:1?placement=none", "--placement must be pack or spread; got none."),
        ("k8s:Team", "--hosts k8s needs a namespace and maybe the ranks of each pod, such as k8s:team=4; got Team."),
        ("k8s:team=0", "such as k8s:team=4; got team=0."),
        ("k8s:team?gpus_per_rank=2", "--gpus-per-rank must be 0 or 1, as a rank uses one device; got 2."),
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


def test_options_of_a_scheduler_need_one() -> None:
    assert with_scheduler_options("ray:a:1", 1, "spread") == "ray:a:1?gpus_per_rank=1&placement=spread"
    assert with_scheduler_options("ray", 0, None) == "ray:?gpus_per_rank=0"
    assert with_scheduler_options("k8s:team=4", 1, None) == "k8s:team=4?gpus_per_rank=1"
    assert with_scheduler_options("slurm", None, None) == "slurm"
    with pytest.raises(UsageError, match="--gpus-per-rank and --placement are for --hosts ray"):
        with_scheduler_options("slurm", None, "pack")
    with pytest.raises(UsageError, match="k8s has --gpus-per-rank, too"):
        with_scheduler_options("k8s", None, "pack")


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


def test_rank_and_its_replacement_see_one_mig_instance(tmp_path: Path) -> None:
    with Script(tmp_path) as script:
        script.ok(f"{PLAN}c = axon_nb.start(2)")
        for _ in range(2):
            assert script.value(f"dict(c.run({SEEN!r}, quiet=True).values)") == {0: "MIG-a", 1: "MIG-b"}
            assert script.value("c.repair('1').ranks") == (1,)


def test_other_launchers_reject_several_mig_instances(tmp_path: Path) -> None:
    with Script(tmp_path) as script:
        refused = script.run(f"{PLAN}axon_nb.start(2, engines='local')")
        assert refused.kinds[0] == "UsageError"
        assert "--engines local gives all ranks one MIG instance: use `--engines axon`, or `-n 1`." in refused.message
