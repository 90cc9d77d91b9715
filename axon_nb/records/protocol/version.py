"""The protocol's version, and the error if notebook and ranks have different ones.

Raise `PROTOCOL` with every change of a record in this room: a field that is added, removed or means something else.
Records carry no version of their own. The two sides compare it once, when ranks join and when a notebook attaches, and
refuse each other if it differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from axon_nb._version import __version__

PROTOCOL = 14
"""The version that this code speaks."""


@dataclass(frozen=True, slots=True)
class Version:
    """The versions of one side."""

    package: str
    """Version of axon_nb; empty if unknown."""
    protocol: int
    """Version of the protocol; 0 for an axon_nb that had no number yet."""

    def __str__(self) -> str:
        package = f"axon_nb {self.package}" if self.package else "an older axon_nb"
        return f"{package} (protocol {self.protocol})" if self.protocol else package


def own_version() -> Version:
    """Return the versions of this process."""
    return Version(__version__, PROTOCOL)


def read_version(fields: Mapping[str, Any] | None) -> Version:
    """Read the version that another process reported; one that reported none speaks protocol 0."""
    if not isinstance(fields, Mapping):
        return Version("", 0)
    package, protocol = fields.get("package"), fields.get("protocol")
    return Version(package if isinstance(package, str) else "", protocol if isinstance(protocol, int) else 0)


def refuse_attach(name: str, theirs: Version) -> str:
    """Why a notebook cannot attach to a running cluster, with the fix; empty if both speak the same protocol.

    Args:
        name: The cluster's name.
        theirs: What its ranks run.
    """
    ours = own_version()
    if theirs.protocol == ours.protocol:
        return ""
    install = f"install axon_nb {theirs.package}" if theirs.package else "install the axon_nb that started them"
    return (
        f"The ranks of {name!r} run {theirs}, but this notebook has {ours}. Run `%distributed start` to start new "
        f"ranks. To keep these, {install} here, restart the kernel and attach again."
    )


def refuse_join(rank: int, host: str, theirs: Version) -> str:
    """Why a rank cannot join, with the fix; empty if both sides speak the same protocol.

    Args:
        rank: The rank.
        host: Where it runs.
        theirs: What it runs.
    """
    ours = own_version()
    if theirs.protocol == ours.protocol:
        return ""
    return (
        f"Rank {rank} on {host} runs {theirs}, but this notebook has {ours}. Install axon_nb {ours.package} on every "
        "host, then run `%distributed start`."
    )


def refuse_host(name: str, theirs: Version) -> str:
    """Why a host's agent cannot join the cluster, with the fix; empty if both sides speak the same protocol."""
    own = own_version()
    if theirs.protocol == own.protocol:
        return ""
    return (
        f"The host {name!r} runs {theirs}, but the notebook has {own}. Install axon_nb {own.package} on every host, "
        "then run `%distributed start`."
    )
