"""A second host for tests: a network namespace with its own address and host name, and the start of its agent."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

FAR_HOST = "far-host"
_NAMESPACE = "AXON_NB_TEST_NAMESPACE"
_NOBODY = "02:00:00:00:00:01"
"""A hardware address that no interface has."""

HERE = """
def far(command):
    return ["sh", "-c", f"exec env {command} --name far-host"]
"""
"""The agent is one more process on this machine."""

IN_NAMESPACE = f"""
def far(command):
    move = ["ip", "netns", "exec", os.environ["{_NAMESPACE}"], "unshare", "--uts", "sh", "-c"]
    return [*move, f"hostname {FAR_HOST}; exec env {{command}}"]
"""
"""The agent is behind a network link."""

CLOCK_AHEAD_S = 5000
IN_OTHER_TIME = ("unshare", "--time", "--monotonic", f"{CLOCK_AHEAD_S}", "--fork", "--kill-child")
"""What runs a command with a monotonic clock that is ahead by `CLOCK_AHEAD_S`."""
HERE_IN_OTHER_TIME = f"""
def far(command):
    return [*{IN_OTHER_TIME}, "sh", "-c", f"exec env {{command}} --name {FAR_HOST}"]
"""
"""The agent is one more process on this machine, with another clock."""

_START = """
import contextlib, io, os, subprocess, sys, axon_nb

%s

def join():
    global joined
    env = {**os.environ, "PATH": os.path.dirname(sys.executable) + ":" + os.environ["PATH"]}
    log = open("joined.log", "a")
    joined = subprocess.Popen(far(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)

class Pasted(io.StringIO):
    def write(self, text):
        global command
        for line in text.splitlines():
            if "AXON_NB_JOIN_KEY=" in line:
                command = line.strip()
                join()
        return len(text)

with contextlib.redirect_stdout(Pasted()):
    c = axon_nb.start(4, hosts="join", interface=%r, devices="cpu")
"""


@dataclass(frozen=True)
class Network:
    """A link between this host and the other."""

    interface: str
    near_ip: str
    far_ip: str
    far_interface: str
    environment: dict[str, str]

    @contextlib.contextmanager
    def cut(self, *, silently: bool = False) -> Iterator[None]:
        """Cut the link for a while: packets are lost in both directions, and no connection is closed.

        Args:
            silently: Whether each end goes on sending, to an address that nobody has; else the link itself is down.
        """
        far = ["-n", self.environment[_NAMESPACE]]
        if silently:
            ends = (([], self.far_ip, self.interface), (far, self.near_ip, self.far_interface))
            cut = [[*where, "neigh", "replace", ip, "lladdr", _NOBODY, "dev", name] for where, ip, name in ends]
            heal = [[*where, "neigh", "del", ip, "dev", name] for where, ip, name in ends]
        else:
            link = [*far, "link", "set", self.far_interface]
            cut, heal = [[*link, "down"]], [[*link, "up"]]
        _at_once(cut)
        try:
            yield
        finally:
            _at_once(heal)


def _at_once(commands: list[list[str]]) -> None:
    """Run several commands of `ip` at the same time: on a busy machine, one after the other takes long."""
    processes = [subprocess.Popen(["ip", *words]) for words in commands]
    assert [process.wait(60) for process in processes] == [0] * len(processes), commands


def _ip(*words: str) -> subprocess.CompletedProcess[Any]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=60)


def why_not() -> str:
    """Why there can be no second host here; empty when there can."""
    if os.getuid() != 0:
        return "needs root, for a network namespace"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs `ip` and `unshare`"
    probe = f"axon{os.getpid()}p"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
    except (OSError, subprocess.SubprocessError):
        return "may not make a network namespace"
    return ""


def one_clock_only() -> str:
    """Why no process here can have another clock; empty when one can."""
    try:
        done = subprocess.run([*IN_OTHER_TIME, "true"], capture_output=True, text=True, check=False, timeout=60)
    except OSError:
        return "needs `unshare`"
    return f"needs a time namespace: {done.stderr.strip()}" if done.returncode else ""


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """The second host, for as long as it lasts."""
    name = f"axon{os.getpid()}"
    near, far, third = f"{name}n"[-15:], f"{name}f"[-15:], os.getpid() % 250
    _ip("netns", "add", name)
    try:
        _ip("link", "add", near, "type", "veth", "peer", "name", far)
        _ip("link", "set", far, "netns", name)
        _ip("addr", "add", f"10.78.{third}.1/24", "dev", near)
        _ip("link", "set", near, "up")
        for words in (["addr", "add", f"10.78.{third}.2/24", "dev", far], ["link", "set", far, "up"]):
            _ip("netns", "exec", name, "ip", *words)
        _ip("netns", "exec", name, "ip", "link", "set", "lo", "up")
        yield Network(near, f"10.78.{third}.1", f"10.78.{third}.2", far, {_NAMESPACE: name})
    finally:
        with contextlib.suppress(subprocess.SubprocessError):
            _ip("link", "del", near)
        _ip("netns", "del", name)


def start_with_joined_host(where: str, interface: str) -> str:
    """Return lines that start ranks 0 and 1 on this host, 2 and 3 on another.

    They define `c`, the cluster, `joined`, the process of the other host's agent, and `join()`, which runs it again.

    Args:
        where: `HERE` or `IN_NAMESPACE`.
        interface: The network interface on which hosts join.
    """
    return _START % (where, interface)
