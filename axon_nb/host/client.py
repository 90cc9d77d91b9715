"""The notebook's connection to the host agent: commands with replies, events that the agent pushes, and queries.

Queries have a time limit; they neither own the cluster nor keep it alive.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from axon_nb.errors import ClusterLostError, StartError
from axon_nb.host.children import describe_controller_exit
from axon_nb.host.connections import PeerProcess, peer_credentials
from axon_nb.host.run_dir import RunDir
from axon_nb.records.environment import AGENT_SERVER, PYTHON_PATH
from axon_nb.records.protocol import agent as messages
from axon_nb.records.protocol.wire import ProtocolError, decode

R = TypeVar("R")
_CONNECT_TIMEOUT_S = 60.0
_REPLY_TIMEOUT_S = 120.0
"""The agent does not reply while it imports torch: for a second, or a minute on a busy machine."""
_POLL_S = 0.005
_KILL_TIMEOUT_S = 5.0


def spawn_agent(run_dir: RunDir, *, controller: list[str], entry: str, imports_later: bool = False) -> int:
    """Start a host agent for `run_dir` in a new session; return its pid at once, before it serves.

    A thread reaps it, so that a long-lived kernel keeps no zombie.
    """
    package_parent = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, PYTHON_PATH.name: os.pathsep.join(filter(None, [PYTHON_PATH.get(), package_parent]))}
    env |= run_dir.ipython_env()
    env.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asked about GPUs in the usual way, CUDA would forbid a fork
    argv = [sys.executable, "-P", "-m", "axon_nb.host", f"--run-dir={run_dir.path}", f"--entry={entry}"]
    if controller:
        argv.append(f"--controller={json.dumps(controller)}")
    argv += ["--later"] if imports_later else []
    log = os.open(run_dir.path / "log" / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        if AGENT_SERVER.get() and (pid := _fork_agent(AGENT_SERVER.get(), argv, env, log)):
            return pid
        process = subprocess.Popen(
            argv, env=env, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    finally:
        os.close(log)
    threading.Thread(target=process.wait, name="axon_nb-agent-reaper", daemon=True).start()
    return process.pid


def _fork_agent(server: str, argv: list[str], env: dict[str, str], log: int) -> int:
    """Have a process that has imported torch fork the agent; return 0 if it does not for this environment."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server)
        socket.send_fds(connection, [json.dumps({"argv": argv, "env": env}).encode()], [log])
        connection.shutdown(socket.SHUT_WR)
        return int(connection.recv(64) or b"0")


def outcome(kind: type[messages.Command[R]], reply: Mapping[str, Any]) -> R:
    """Read the agent's reply to a command of `kind`.

    Raises:
        StartError: the agent rejects the command; the message says why.
    """
    if reason := messages.rejection(kind, reply):
        raise StartError(reason)
    return messages.decode_outcome(kind, reply)


class AgentClient:
    """A connection to one agent. A reader thread completes replies and dispatches events.

    A client with an `owner` keeps the cluster alive while connected; one with an empty owner only observes. An
    exclusive one raises `StartError` if another owner is connected.
    """

    def __init__(self, run_dir: RunDir, *, owner: str, agent_pid: int | None = None, exclusive: bool = False) -> None:
        self.run_dir = run_dir
        self.name = run_dir.path.name
        """The cluster's name in messages."""
        self._sock = _connect(run_dir, agent_pid)
        self._process = PeerProcess(self._sock)
        self._ids = itertools.count(1)
        self._replies: dict[int, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._handlers: list[Callable[[messages.AgentEvent], None]] = []
        self.exits: dict[int, messages.Exit] = {}
        """The last exit event of each rank that has not been forked again."""
        self.closed = threading.Event()
        self.end_reason = ""
        """Why the cluster ended by itself, as a sentence; empty if it has not."""
        self._reader = threading.Thread(target=self._read, name="axon_nb-agent", daemon=True)
        self._reader.start()
        try:
            self.hello_reply = self.call(messages.Hello(owner, exclusive))
        except BaseException:
            self.close()
            raise

    def on_event(self, handler: Callable[[messages.AgentEvent], None]) -> None:
        """Call `handler` on the reader thread with each event; `Closed` is the last one."""
        self._handlers.append(handler)

    def send(self, command: messages.Command[Any]) -> Future[dict[str, Any]]:
        """Send a command; the future resolves to the reply, for `outcome`, or raises `ClusterLostError`."""
        if isinstance(command, messages.Fork):
            self.exits.pop(command.rank, None)
        number = next(self._ids)
        future: Future[dict[str, Any]] = Future()
        line = json.dumps(messages.command_message(number, command)).encode() + b"\n"
        with self._lock:
            if self.closed.is_set():
                raise ClusterLostError(f"Cluster {self.name!r} is gone. Run `%distributed start` to start a new one.")
            self._replies[number] = future
            try:
                self._sock.sendall(line)
            except OSError:
                self._replies.pop(number, None)
                raise ClusterLostError(
                    f"The host agent of {self.name!r} is gone. Run `%distributed start` to start a new cluster."
                ) from None
        return future

    def call(self, command: messages.Command[R]) -> R:
        """Send a command and wait for the reply.

        Raises:
            ClusterLostError: the agent is gone or does not reply.
            StartError: the agent rejects the command; the message says why.
        """
        return self.result(type(command), self.send(command))

    def result(self, kind: type[messages.Command[R]], future: Future[dict[str, Any]]) -> R:
        """Wait for the reply to a command of `kind`, as `call` does.

        Args:
            kind: Of the command.
            future: What `send` returned.
        """
        try:
            reply = future.result(_REPLY_TIMEOUT_S)
        except TimeoutError:
            raise ClusterLostError(
                f"The host agent of {self.name!r} did not reply to {messages.command_name(kind)!r} within "
                f"{_REPLY_TIMEOUT_S:.0f} s."
            ) from None
        return outcome(kind, reply)

    def responds(self, timeout_s: float) -> bool:
        """Whether the agent replies within `timeout_s` seconds: one that is stopped or swapped out does not.

        Raises:
            ClusterLostError: the agent is gone.
        """
        try:
            self.send(messages.GetInfo()).result(timeout_s)
        except TimeoutError:
            return False
        return True

    def kill_ranks(self, ranks: Collection[int], timeout_s: float) -> bool:
        """Kill ranks and wait for their exits, at most `timeout_s` seconds; return whether none of them is left."""
        end = time.monotonic() + timeout_s
        replies = {rank: self.send(messages.Signal(rank, int(signal.SIGKILL))) for rank in ranks}
        try:
            alive = {rank for rank, reply in replies.items() if outcome(messages.Signal, reply.result(timeout_s)).sent}
        except (ClusterLostError, TimeoutError):
            return False
        while not alive <= set(self.exits):
            if self.closed.is_set() or time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
        return True

    def _read(self) -> None:
        try:
            with self._sock.makefile("rb") as lines:
                for line in lines:
                    message = json.loads(line)
                    if "event" in message:
                        event: messages.AgentEvent = decode(messages.AgentEvent, message)
                        if isinstance(event, messages.ControllerExit):
                            self.end_reason = describe_controller_exit(event.code, event.last_output)
                        elif isinstance(event, messages.Exit):
                            self.exits[event.rank] = event
                        self._emit(event)
                    elif (future := self._replies.pop(message.pop("id", None), None)) is not None:
                        future.set_result(message)
        except (OSError, ValueError, ProtocolError):
            pass
        finally:
            with self._lock:
                self.closed.set()
                replies, self._replies = self._replies, {}
            for future in replies.values():
                future.set_exception(ClusterLostError(f"The host agent of {self.name!r} is gone."))
            self._emit(messages.Closed())

    def _emit(self, event: messages.AgentEvent) -> None:
        for handler in list(self._handlers):
            handler(event)

    def close(self) -> None:
        """Disconnect; unless `stop` was sent, the agent keeps the ranks for the keep-alive time."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._process.close()
        if threading.current_thread() is not self._reader:
            self._reader.join(2.0)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Tell the agent to stop everything; kill it and its children if that takes longer than `timeout_s` seconds.

        Returns:
            Whether it is gone.
        """
        with contextlib.suppress(ClusterLostError):
            self.send(messages.Stop())
        self._process.signal(signal.SIGCONT)  # somebody may have stopped it
        gone = self.closed.wait(timeout_s)
        if not gone and self._process.kill_with_children():
            gone = self.closed.wait(_KILL_TIMEOUT_S)
            self.run_dir.remove()
        self.close()
        return gone


def _connect(run_dir: RunDir, agent_pid: int | None) -> socket.socket:
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(str(run_dir.agent_socket))
            return sock
        except OSError as error:
            sock.close()
            started = agent_pid is None or not Path("/proc").is_dir() or Path(f"/proc/{agent_pid}").exists()
            if not started or agent_pid is None or time.monotonic() > deadline:
                reason = last_lines(run_dir.path / "log" / "agent.log") or str(error)
                raise StartError(f"The host agent in {run_dir.path} failed to start: {reason}") from None
        time.sleep(0.003)


def last_lines(log: Path, count: int = 3) -> str:
    """Return what a log ends with, as one line; empty if there is none."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return " | ".join(lines[-count:])


class AgentQuery:
    """A short connection to the agent of `run_dir`; unlike `AgentClient` it has no thread and sends no `hello`.

    Raises:
        OSError: nothing listens on the agent's socket.
    """

    def __init__(self, run_dir: RunDir, *, timeout_s: float) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(timeout_s)
        try:
            self._sock.connect(str(run_dir.agent_socket))
        except OSError:
            self._sock.close()
            raise
        self._lines = self._sock.makefile("rb")

    @property
    def pid(self) -> int | None:
        """The agent's pid according to the Linux kernel, even if the agent hangs; None on other systems."""
        credentials = peer_credentials(self._sock)
        return credentials[0] or None if credentials is not None else None

    def request(self, command: messages.Command[Any]) -> dict[str, Any]:
        """Send a command and return the fields of the reply, unchecked: the agent may be of another version.

        Raises:
            TimeoutError: no reply within the limit.
            OSError: the agent is gone.
        """
        self._sock.sendall(json.dumps(messages.command_message(1, command)).encode() + b"\n")
        line = self._lines.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("the host agent closed the connection")
        reply = json.loads(line)
        if not isinstance(reply, dict):
            raise ConnectionError("the host agent sent an unreadable reply")
        return reply

    def wait_closed(self, timeout_s: float) -> bool:
        """Whether the agent closes the connection, as when it exits, within `timeout_s` seconds."""
        self._sock.settimeout(timeout_s)
        try:
            self._lines.read()
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        """Disconnect; the agent keeps running."""
        with contextlib.suppress(OSError):
            self._lines.close()
            self._sock.close()

    def __enter__(self) -> AgentQuery:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
