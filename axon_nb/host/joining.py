"""`axon-nb host --join`: serve this host in a cluster whose notebook is on another."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from axon_nb.errors import StartError
from axon_nb.host.agent import Agent, AgentOptions
from axon_nb.host.link import Member
from axon_nb.host.run_dir import RunDir
from axon_nb.host.schedulers.tunnel import relay
from axon_nb.records.environment import JOIN_KEY, SLURM_NODE
from axon_nb.records.protocol.recovery import ENGINE_ENTRY


def join_cluster(
    address: str, *, name: str = "", read_key: bool = False, tunnel: Sequence[int] = (), entry: str = ENGINE_ENTRY
) -> int:
    """Join a cluster and run ranks here until it stops; return the exit status.

    Args:
        address: Where the notebook's agent listens, ``ip:port``.
        name: The name of this host in the cluster; empty: its name in Slurm, or its host name.
        read_key: Whether to read the cluster's key from standard input instead of the environment, as the notebook
            has it done. Such an agent joins only if no other one has its name.
        tunnel: Ports of the notebook's loopback that are to be reached on this host's, through a port-forward.
        entry: What forked ranks run, as ``module:function``.

    Raises:
        StartError: this host cannot join; the message says why.
    """
    ip, _, port = address.rpartition(":")
    if not ip or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise StartError(f"--join must be IP:PORT, as `%distributed start --hosts join` prints it; got {address!r}.")
    key = sys.stdin.readline().strip() if read_key else JOIN_KEY.get()
    os.environ.pop(JOIN_KEY.name, None)
    if not key:
        raise StartError(
            f"The cluster's key is missing. Set {JOIN_KEY.name}, as the command that `%distributed start --hosts join` "
            "prints does."
        )
    if tunnel:
        relay(tunnel)
    os.umask(0o077)
    # Asked about GPUs in the usual way, CUDA would forbid a fork.
    os.environ.update({"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **os.environ})
    run_dir = RunDir.create()
    own_name = name or SLURM_NODE.get() or socket.gethostname()
    member = Member(address, key.encode(), own_name, run_dir, is_only=read_key)
    try:
        member.join()
        print(f"Joined the cluster at {address} as {member.name!r}.", flush=True)
    except BaseException:
        run_dir.remove()
        raise
    Agent(run_dir, AgentOptions(controller=[], entry=entry, member=member)).run()
    return 0
