"""The agent's event loop: handles commands, forks ranks, reports deaths, serves the store, stops when unused."""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from axon_nb.errors import StartError
from axon_nb.host import children, connections
from axon_nb.host.fork import EXIT_LIMIT_S, ForkQueue
from axon_nb.host.link import Hosts, Member, MemberConnection
from axon_nb.host.resources import GpuLocks, read_gpus
from axon_nb.host.run_dir import RunDir
from axon_nb.host.store import StoreServer
from axon_nb.records.environment import AGENT_SERVER, JOIN_KEY, SLURM_NODE
from axon_nb.records.protocol import agent as messages
from axon_nb.records.protocol.recovery import ENGINE_ENTRY
from axon_nb.records.protocol.wire import ProtocolError, decode, encode

_FIRST_CONTACT_TIMEOUT_S = 180.0
_TERM_GRACE_S = 1.0
_EXIT_POLL_S = 0.05
_LONGEST_WAIT_S = 3600.0  # selectors cannot wait as long as a month


class AgentOptions(Struct, frozen=True):
    """Command-line options of an agent."""

    controller: list[str]
    """Command line of the ipyparallel controller; empty for none."""
    entry: str
    """What forked ranks run, as `module:function`; empty: torch is not imported, and no rank can be forked."""
    imports_later: bool = False
    """Whether nothing is imported for ranks before one is to be forked here: all are on other hosts."""
    member: Member | None = None
    """The membership in a cluster of another host; None: this agent is the notebook's."""


class Agent:
    """Single-threaded event loop. Never runs a torch operation: a process that has cannot be forked safely."""

    def __init__(self, run_dir: RunDir, options: AgentOptions) -> None:
        self.run_dir = run_dir
        self.options = options
        self.children = children.Children()
        self._last_output = children.LastOutput()
        self._oom = children.OomCounter()
        self.info: messages.ClusterFacts | None = None
        """What a notebook has stored; None until it has."""
        self._store = StoreServer()
        self._store_listener: connections.TcpListener | None = None
        self._selector = selectors.DefaultSelector()
        self._peers: set[connections.Connection] = set()
        self._forks = ForkQueue(
            options.entry, self.children, self._last_output, self._inherited, imports_later=options.imports_later
        )
        self.hosts = Hosts(self._selector, self._peers, run_dir.engine_file, self._report_exit)
        self._member = options.member
        self._deadline: float | None = None if self._member else time.monotonic() + _FIRST_CONTACT_TIMEOUT_S
        self._starter = None if self._member or AGENT_SERVER.get() else run_dir.starter_pid()
        """Pid of the notebook, the parent, until it connects; if it dies before, nobody will connect."""
        self._stopping: float | None = None
        self._start_failure = ""
        """Why the cluster cannot start, reported to the notebook when it connects; empty otherwise."""
        self._active_at, self._busy = time.monotonic(), False
        """When a cell last started or ended, or a notebook connected; and whether one runs."""
        self._left_ns = 0
        """Monotonic time at which the last notebook disconnected; 0 if none has."""
        self._deaths: dict[int, messages.Exit] = {}
        self._commands: dict[type[messages.Command[Any]], Callable[[Any, Any], Any]] = {
            messages.Hello: self._hello,
            messages.SetInfo: lambda peer, one: self._write_info(one.info, peer.owner),
            messages.ReportActivity: lambda _, one: self._mark_active(busy=one.busy),
            messages.GetInfo: lambda peer, _: self._state(peer),
            messages.ServeStore: self._serve_store,
            messages.ReserveGpus: GpuLocks().reserve,
            messages.Signal: lambda _, one: messages.Signalled(self.children.signal_rank(one.rank, one.signal)),
            messages.ServeHosts: lambda _, one: self.hosts.listen(one.ip, bytes.fromhex(one.key)),
            messages.Stop: lambda *_: self._stop_on_request(),
        }
        if (member := self._member) is not None:
            self._commands[messages.CompareFiles] = lambda _, one: messages.MissingFiles(
                member.copy.compare(one.folder, one.path, one.files)
            )
            self._commands[messages.WriteFile] = lambda _, one: member.copy.write(
                one.name, one.content, offset=one.offset, time_ns=one.time_ns, is_last=one.is_last
            )

    def run(self) -> None:
        """Serve until stopped; leave no child process and no file behind."""
        children.adopt_orphans()
        self._wakeup = children.Wakeup(self._begin_stop, at_terminal=self._member is not None)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._on_signal)
        store = connections.Listener(self.run_dir.store_socket, self._selector, self._accept_store)
        commands = connections.Listener(self.run_dir.agent_socket, self._selector, self._accept_command)
        self._listeners: list[connections.Listener | connections.TcpListener | None] = [store, commands]
        try:
            if self.options.controller:
                self.children.spawn_controller(self.options.controller, self.run_dir.path / "log" / "controller.log")
            self._write_info(None)
            self._loop()
        finally:
            self.children.kill_all()
            self.run_dir.remove()

    def _loop(self) -> None:
        while True:
            now = time.monotonic()
            due = [self._store.expire(now), self.hosts.step(now), self._check_membership(now)]
            if self._stopping is not None:
                if not self.children.any_alive and not self.hosts.stopping:
                    return
                # Ranks get a moment to clean up; the controller has nothing to save.
                if self._stopping <= now and self.children.exiting(EXIT_LIMIT_S):
                    self._stopping = now + _EXIT_POLL_S
                if now >= self._stopping or not self.children.ranks:
                    self.children.kill_all()
                    self._stopping = now + _TERM_GRACE_S
            elif (self._deadline is not None and now >= self._deadline) or self._starter not in (None, os.getppid()):
                self._begin_stop()
            elif self._idle_at is not None and now >= self._idle_at:
                self._broadcast(messages.IdleStop(now - self._active_at))
                self._begin_stop()
            idle = self._forks.step(busy=bool(self.children.ranks or self.hosts.ranks))
            due += [self._deadline, self._idle_at, self._stopping, None if self._starter is None else now + 1.0]
            deadlines = [at for at in due if at is not None]
            wait = min(max(0.0, min(deadlines) - time.monotonic()), _LONGEST_WAIT_S) if deadlines else None
            for key, mask in self._selector.select(wait if idle else 0):
                key.data(mask)

    @property
    def _idle_at(self) -> float | None:
        """When the cluster has been idle for too long."""
        limit_s = self.info.idle_stop_s if self.info is not None and self._stopping is None else 0.0
        return self._active_at + limit_s if limit_s and not self._busy else None

    def _mark_active(self, *, busy: bool) -> None:
        self._active_at, self._busy = time.monotonic(), busy
        self.run_dir.mark_active()

    def _on_signal(self, mask: int) -> None:
        self._wakeup.clear()
        for death in self.children.reap():
            self._report_death(death)

    def _report_death(self, death: children.Death) -> None:
        if death.rank is None and self._stopping is not None:
            return  # we stopped it ourselves
        facts: dict[str, Any] = {"pid": death.pid, "code": death.code, "time_ns": time.monotonic_ns()}
        facts["out_of_memory"] = self._oom.poll()
        if death.rank is not None:
            self._report_exit(messages.Exit(rank=death.rank, **facts | self._last_output.of(death.rank)))
            return
        last_output = children.last_line(self.run_dir.path / "log" / "controller.log")
        self._broadcast(messages.ControllerExit(**facts, last_output=last_output))
        self._start_failure = children.describe_controller_exit(death.code, last_output)
        if self._starter is None:  # otherwise stay, to report this to the notebook when it connects
            self._begin_stop()

    def _report_exit(self, event: messages.Exit) -> None:
        self._deaths[event.rank] = event
        self._broadcast(event)

    def _broadcast(self, event: messages.AgentEvent) -> None:
        message = encode(event)
        for peer in list(self._peers):
            if isinstance(peer, connections.CommandConnection | MemberConnection) and peer.owner:
                peer.send_message(message)

    def _check_membership(self, now: float) -> float | None:
        if self._member is None:
            return None
        due, link = self._member.step(now, serving=bool(self.children.ranks))
        if link is not None:
            self._peers.add(self._member.serve(link, self._selector, self._closed, self._command))
        elif self._member.membership.is_over:
            self._begin_stop()
        return due

    def _accept_command(self, sock: socket.socket) -> None:
        self._peers.add(connections.CommandConnection(sock, self._selector, self._closed, self._command))

    def _accept_store(self, sock: socket.socket) -> None:
        self._peers.add(connections.StoreConnection(sock, self._selector, self._closed, self._store.handle))

    def _serve_store(self, peer: connections.CommandConnection, command: messages.ServeStore) -> messages.StorePort:
        """Serve the store over TCP too, for ranks on other hosts; one listener, however often it is asked for."""

        def accept(sock: socket.socket) -> None:
            key = bytes.fromhex(command.key)
            connections.close_unauthenticated(list(self._peers))
            self._peers.add(connections.AcceptedConnection(sock, self._selector, self._closed, self._store.handle, key))

        self._store_listener = self._store_listener or connections.TcpListener(command.ip, self._selector, accept)
        return messages.StorePort(self._store_listener.port)

    def _closed(self, peer: connections.Connection) -> None:
        self._peers.discard(peer)
        if isinstance(peer, MemberConnection) and self._member is not None:
            self.children.kill_all()  # nobody can use these ranks any more
            self._member.lost(time.monotonic())
        if isinstance(peer, connections.CommandConnection) and peer.owner and not self._owned:
            # The kernel was restarted or killed. Ranks wait for it to reattach; a prewarmed agent stops.
            self._left_ns = time.monotonic_ns()
            self._deadline = time.monotonic() + (0.0 if self.info is None else self.info.keep_alive_s)

    @property
    def _owned(self) -> bool:
        return any(isinstance(peer, connections.CommandConnection) and peer.owner for peer in self._peers)

    def _command(self, peer: connections.CommandConnection | MemberConnection, message: dict[str, Any]) -> None:
        number, name = message.pop("id", None), message.pop("cmd", "")
        kind = messages.command_kind(name)

        def answer(fields: Mapping[str, Any]) -> None:
            peer.send_message({"id": number, **fields})

        if kind is messages.ReadGpus:
            read_gpus(self._selector, lambda report: answer(encode(report)))
            return
        if kind is None:
            reply = messages.failure(f"unknown command {name!r}")
        elif kind is messages.Fork and not (self.options.entry or message.get("host")):
            reply = messages.failure("this agent does not fork ranks")
        else:
            try:
                command = decode(kind, message)
                if self.hosts.take(command, answer):
                    return
                if isinstance(command, messages.Fork):
                    self._forks.put(self._member.localized(command) if self._member else command, answer)
                    return
                outcome = self._commands[kind](peer, command)
                reply = {} if outcome is None else encode(outcome)
            except StartError as error:
                reply = messages.refusal(str(error))
            except ProtocolError as error:
                reply = messages.failure(str(error))
            except (KeyError, TypeError, ValueError, OSError) as error:
                reply = messages.failure(f"{type(error).__name__}: {error}")
        answer(reply)

    def _hello(self, peer: connections.CommandConnection, command: messages.Hello) -> messages.AgentState:
        if command.exclusive and self._owned:
            raise StartError(f"The cluster {self.info.name if self.info else ''!r} is in use by another notebook.")
        peer.owner = command.owner
        if peer.owner and self._start_failure:
            self._begin_stop()
            raise StartError(self._start_failure)
        if peer.owner:
            self._deadline = self._starter = None
            self._mark_active(busy=False)
            self._write_info(self.info, peer.owner)
        return self._state(peer)

    def _state(self, peer: connections.CommandConnection | MemberConnection) -> messages.AgentState:
        return messages.AgentState(
            pid=os.getpid(),
            ready=self._forks.ready,
            idle=self._forks.idle,
            ranks=(ranks := self.children.ranks | self.hosts.ranks),
            controller=self.children.controller,
            stopped=(*self.children.stopped_ranks(), *self.hosts.stopped),
            controller_stopped=self.children.controller_stopped,
            deaths={rank: death for rank, death in self._deaths.items() if rank not in ranks},
            left_ns=self._left_ns,
            attached=self._owned,
            info=self.info,
            hosts=self.hosts.facts,
            hosts_refused=self.hosts.roster.refused,
            hosts_lost=self.hosts.lost,
            clocks=self.hosts.clocks,
            received_ns=peer.received_ns if isinstance(peer, MemberConnection) else 0,
            sent_ns=time.monotonic_ns(),
        )

    def _inherited(self) -> list[Any]:
        listeners = [*self._listeners, self._store_listener, self.hosts.listener]
        sockets = [one.sock for one in listeners if one is not None]
        return [self._selector, *self._wakeup.sockets, *sockets, *(peer.sock for peer in self._peers)]

    def _write_info(self, info: messages.ClusterFacts | None, owner: str = "") -> None:
        """Store the facts of the cluster, also in the file that other processes read without asking."""
        self.info = None if info is None else replace(info, owner=owner)
        self._active_at = time.monotonic()  # a prewarmed agent may have waited for long
        self.run_dir.write_info({"pid": os.getpid(), **({} if self.info is None else encode(self.info))})

    def _stop_on_request(self) -> None:
        self._broadcast(messages.Stopped())
        self._begin_stop()

    def _begin_stop(self) -> None:
        if self._stopping is None:
            self._stopping = time.monotonic() + _TERM_GRACE_S
            self._deadline = None
            self.hosts.stop()
            self.children.terminate_ranks()


# ---- `axon-nb host --join`: serve this host in a cluster whose notebook is on another --------------------------------


def join_cluster(
    address: str, *, name: str = "", read_key: bool = False, tunnel: Sequence[int] = (), entry: str = ENGINE_ENTRY
) -> int:
    """Join a cluster and run ranks here until it stops; return the exit status, 0 also if the cluster is gone.

    Args:
        address: Where the notebook's agent listens, ``ip:port``.
        name: The name of this host in the cluster; empty: its name in Slurm, or its host name.
        read_key: Whether to read the cluster's key from standard input instead of the environment, as the notebook
            has it done. Such an agent joins only if no other one has its name.
        tunnel: Ports of the notebook's loopback that are to be reached on this host's, through a port-forward.
        entry: What forked ranks run, as ``module:function``.

    Raises:
        StartError: this host cannot join, or not again after a cut; the message says why.
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
        from axon_nb.host.schedulers.k8s import relay

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
    if member.refusal is not None:
        raise member.refusal
    return 0
