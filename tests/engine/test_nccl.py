"""What of the NCCL side needs no GPU: its environment, and that it stands back where there is no NCCL."""

from __future__ import annotations

from axon_nb.engine.groups import nccl


def test_what_recovery_cannot_do_without_is_set_whatever_it_was() -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_FR_BUFFER_SIZE": "7"}
    nccl.set_environment(environ, one_host=True)
    assert {name: environ[name] for name in nccl.REQUIRED} == dict.fromkeys(nccl.REQUIRED, "0")
    assert environ["TORCH_FR_BUFFER_SIZE"] == "7"
    assert environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] == "1"
    assert environ["NCCL_SOCKET_IFNAME"] == "lo"


def test_the_sockets_are_the_users_to_choose_where_there_are_many_hosts_or_a_wish() -> None:
    many: dict[str, str] = {}
    nccl.set_environment(many, one_host=False)
    assert "NCCL_SOCKET_IFNAME" not in many
    wished = {"NCCL_SOCKET_IFNAME": "eth1"}
    nccl.set_environment(wished, one_host=True)
    assert wished["NCCL_SOCKET_IFNAME"] == "eth1"


def test_a_gloo_rank_has_no_nccl_groups() -> None:
    assert nccl.groups() is None
