"""The agent's event loop: handles commands, forks ranks, reports deaths, serves the store, stops when unused."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from axon_nb.errors import StartError
from axon_nb.host.children import Children, Death, adopt_orphans
from axon_nb.host.connections import CommandConnection, Connection, Listener, ProgramOutput, StoreConnection
from axon_nb.host.deaths import LastOutput, OomCounter, describe_controller_exit, last_line
from axon_nb.host.fork import EXIT_LIMIT_S, ForkRequest, Preload, become_rank, exit_mark, signals_blocked
from axon_nb.host.resources.gpus import NVML
from axon_nb.host.run_dir import RunDir
from axon_nb.host.store import StoreServer
from axon_nb.host.store_tcp import AuthenticatedStoreConnection, TcpListener
from axon_nb.records.protocol import agent as messages
from axon_nb.records.protocol.cluster import ClusterFacts
from axon_nb.records.protocol.errors import ProtocolError
from axon_nb.records.protocol.wire import decode, encode

__all__ = ["Agent", "AgentOptions"]

_FIRST_CONTACT_TIMEOUT_S = 180.0
_TERM_GRACE_S = 1.0
_EXIT_POLL_S = 0.05
_LONGEST_WAIT_S = 3600.0  # selectors cannot wait as long as a month


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Command-line options of an agent."""

    controller: list[str]
    """Command line of the ipyparallel controller; empty for none."""
    entry: str
    """What forked ranks run, as `module:function`."""
    preload: bool
    """Whether to import torch and the engine, so that ranks can be forked."""


class Agent:
    """Single-threaded event loop. Never runs a torch operation: a process that has cannot be forked safely."""

    def __init__(self, run_dir: RunDir, options: AgentOptions) -> None:
        self.run_dir = run_dir
        self.options = options
        self.children = Children()
        self._last_output = LastOutput()
        self._oom = OomCounter()
        self.info: ClusterFacts | None = None
        """What a notebook has stored; None until it has."""
        self._store = StoreServer()
        self._selector = selectors.DefaultSelector()
        self._peers: set[Connection] = set()
        self._preload = Preload(enabled=options.preload)
        self._waiting_forks: list[tuple[CommandConnection, int, messages.Fork]] = []
        self._deadline: float | None = time.monotonic() + _FIRST_CONTACT_TIMEOUT_S
        self._starter = run_dir.starter_pid()
        """Pid of the notebook until it connects; if it dies before, nobody will connect."""
        self._stopping: float | None = None
        self._start_failure = ""
        """Why the cluster cannot start, reported to the notebook when it connects; empty otherwise."""
        self._left_ns = 0
        """Monotonic time at which the last notebook disconnected; 0 if none has."""
        self._deaths: dict[int, messages.Exit] = {}  # of ranks that were not replaced
        self._commands: dict[type[messages.Command[Any]], Callable[[CommandConnection, Any], Any]] = {
            messages.Hello: self._hello,
            messages.Signal: lambda _, one: messages.Signalled(self.children.signal_rank(one.rank, one.signal)),
            messages.SetInfo: self._set_info,
            messages.GetInfo: lambda *_: self._state(),
            messages.ServeStore: self._serve_store,
            messages.Stop: lambda *_: self._begin_stop(),
        }

    def run(self) -> None:
        """Serve until stopped; leave no child process and no file behind."""
        adopt_orphans()
        with self._signals():
            self._listeners: list[Listener | TcpListener] = [
                Listener(self.run_dir.store_socket, self._selector, self._accept_store),
                Listener(self.run_dir.agent_socket, self._selector, self._accept_command),
            ]
            try:
                if self.options.controller:
                    self.children.spawn_controller(
                        self.options.controller, self.run_dir.path / "log" / "controller.log"
                    )
                self._write_info(None)
                self._loop()
            finally:
                self.children.kill_all()
                self.run_dir.remove()

    def _loop(self) -> None:
        while True:
            now = time.monotonic()
            due = self._store.expire(now)
            if self._stopping is not None:
                if not self.children.any_alive:
                    return
                # Ranks get a moment to clean up; the controller has nothing to save.
                if self._stopping <= now and self.children.exiting(EXIT_LIMIT_S):
                    self._stopping = now + _EXIT_POLL_S
                if now >= self._stopping or not self.children.ranks:
                    self.children.kill_all()
                    self._stopping = now + _TERM_GRACE_S
            elif (self._deadline is not None and now >= self._deadline) or self._starter not in (None, os.getppid()):
                self._begin_stop()
            idle = not self._preload.step(busy=bool(self._waiting_forks or self.children.ranks))
            if self._preload.ready and self._waiting_forks:
                self._fork_waiting()
            check_starter = None if self._starter is None else now + 1.0
            deadlines = [at for at in (due, self._deadline, self._stopping, check_starter) if at is not None]
            wait = min(max(0.0, min(deadlines) - time.monotonic()), _LONGEST_WAIT_S) if deadlines else None
            for key, mask in self._selector.select(wait if idle else 0):
                key.data(mask)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._wakeup = (reader, writer)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._begin_stop())
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._selector.register(reader, selectors.EVENT_READ, self._on_signal)
        yield

    def _on_signal(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakeup[0].recv(4096)
        for death in self.children.reap():
            self._report_death(death)

    def _report_death(self, death: Death) -> None:
        if death.rank is None and self._stopping is not None:
            return  # we stopped it ourselves
        facts: dict[str, Any] = {"pid": death.pid, "code": death.code, "time_ns": time.monotonic_ns()}
        facts["out_of_memory"] = self._oom.poll()
        if death.rank is not None:
            event = messages.Exit(rank=death.rank, **facts | self._last_output.of(death.rank))
            self._deaths[death.rank] = event
            self._broadcast(event)
            return
        last_output = last_line(self.run_dir.path / "log" / "controller.log")
        self._broadcast(messages.ControllerExit(**facts, last_output=last_output))
        self._start_failure = describe_controller_exit(death.code, last_output)
        if self._starter is None:  # otherwise stay, to report this to the notebook when it connects
            self._begin_stop()

    def _broadcast(self, event: messages.AgentEvent) -> None:
        message = messages.encode_event(event)
        for peer in list(self._peers):
            if isinstance(peer, CommandConnection) and peer.owner:
                peer.send_message(message)

    def _accept_command(self, sock: socket.socket) -> None:
        self._peers.add(CommandConnection(sock, self._selector, self._closed, self._command))

    def _accept_store(self, sock: socket.socket) -> None:
        self._peers.add(StoreConnection(sock, self._selector, self._closed, self._store.handle))

    def _serve_store(self, peer: CommandConnection, command: messages.ServeStore) -> messages.StorePort:
        """Serve the store over TCP too, for ranks on other hosts."""
        key = bytes.fromhex(command.key)

        def accept(sock: socket.socket) -> None:
            clients = [peer for peer in self._peers if isinstance(peer, AuthenticatedStoreConnection)]
            for client in clients:
                if client.overdue:
                    client.close()
            self._peers.add(AuthenticatedStoreConnection(sock, self._selector, self._closed, self._store.handle, key))

        listener = TcpListener(command.ip, self._selector, accept)
        self._listeners.append(listener)
        return messages.StorePort(listener.port)

    def _closed(self, peer: Connection) -> None:
        self._peers.discard(peer)
        if isinstance(peer, CommandConnection) and peer.owner and not self._owned:
            # The kernel was restarted or killed. Ranks wait for it to reattach; a prewarmed agent stops.
            self._left_ns = time.monotonic_ns()
            self._deadline = time.monotonic() + (0.0 if self.info is None else self.info.keep_alive_s)

    @property
    def _owned(self) -> bool:
        return any(isinstance(peer, CommandConnection) and peer.owner for peer in self._peers)

    def _command(self, peer: CommandConnection, message: dict[str, Any]) -> None:
        number, name = message.pop("id", None), message.pop("cmd", "")
        kind = messages.command_kind(name)
        if kind is messages.Fork:
            self._fork(peer, number, message)
            return
        if kind is messages.ReadGpus:
            ProgramOutput(self._selector, [*NVML, "--report"], functools.partial(self._report_gpus, peer, number))
            return
        if kind is None:
            reply = {"error": f"unknown command {name!r}"}
        else:
            try:
                outcome = self._commands[kind](peer, decode(kind, message))
                reply = {} if outcome is None else encode(outcome)
            except StartError as error:
                reply = {"refused": str(error)}
            except ProtocolError as error:
                reply = {"error": str(error)}
            except (KeyError, TypeError, ValueError, OSError) as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
        peer.send_message({"id": number, **reply})

    def _report_gpus(self, peer: CommandConnection, number: Any, output: bytes) -> None:
        report = messages.GpuReport((), "The driver does not reply.")
        with contextlib.suppress(ProtocolError, ValueError):  # it hung or died
            report = decode(messages.GpuReport, json.loads(output))
        peer.send_message({"id": number, **encode(report)})

    def _hello(self, peer: CommandConnection, command: messages.Hello) -> messages.AgentState:
        if command.exclusive and self._owned:
            raise StartError(f"The cluster {self.info.name if self.info else ''!r} is in use by another notebook.")
        peer.owner = command.owner
        if peer.owner and self._start_failure:
            self._begin_stop()
            raise StartError(self._start_failure)
        if peer.owner:
            self._deadline = self._starter = None
            self._write_info(self.info, peer.owner)
        return self._state()

    def _state(self) -> messages.AgentState:
        return messages.AgentState(
            pid=os.getpid(),
            ready=self._preload.ready,
            idle=self._preload.done,
            ranks=dict(self.children.ranks),
            controller=self.children.controller,
            stopped=self.children.stopped_pids(),
            deaths=self._deaths,
            left_ns=self._left_ns,
            attached=self._owned,
            info=self.info,
        )

    def _fork(self, peer: CommandConnection, number: Any, fields: dict[str, Any]) -> None:
        if not self.options.preload:
            peer.send_message({"id": number, "error": "this agent does not fork ranks"})
            return
        try:
            self._waiting_forks.append((peer, number, decode(messages.Fork, fields)))
        except ProtocolError as error:
            peer.send_message({"id": number, "error": str(error)})

    def _fork_waiting(self) -> None:
        waiting, self._waiting_forks = self._waiting_forks, []
        gc.freeze()
        for peer, number, command in waiting:
            try:
                request, agent_pid = ForkRequest.of(command, self.options.entry), os.getpid()
                self._last_output.rank_starting(request.rank, request.log)
                with signals_blocked():
                    pid = os.fork()
                    if pid == 0:
                        become_rank(request, agent_pid, [self._selector, *self._sockets()])
            except OSError as error:
                peer.send_message({"id": number, "error": f"{type(error).__name__}: {error}"})
                continue
            self.children.add_rank(request.rank, pid, exit_mark(request.log))
            self._deaths.pop(request.rank, None)
            peer.send_message({"id": number, **encode(messages.Forked(pid))})

    def _sockets(self) -> list[socket.socket]:
        return [*self._wakeup, *(listener.sock for listener in self._listeners), *(peer.sock for peer in self._peers)]

    def _set_info(self, peer: CommandConnection, command: messages.SetInfo) -> None:
        self._write_info(command.info, peer.owner)

    def _write_info(self, info: ClusterFacts | None, owner: str = "") -> None:
        """Store the facts of the cluster, also in the file that other processes read without asking."""
        self.info = None if info is None else replace(info, owner=owner)
        self.run_dir.write_info({"pid": os.getpid(), **({} if self.info is None else encode(self.info))})

    def _begin_stop(self) -> None:
        if self._stopping is None:
            self._stopping = time.monotonic() + _TERM_GRACE_S
            self._deadline = None
            self.children.terminate_ranks()
