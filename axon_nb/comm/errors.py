"""What can go wrong in communication, as types.

CommError                    base: a call that cannot be made, found before anything is sent
 ├── InvalidRank             a rank that the group does not have
 ├── NotInGroup              this rank is no member of the group
 ├── TensorError             a tensor that the operation cannot take: shape, dtype, device, layout
 │    └── TensorMismatch     ranks bring tensors that do not fit together
 ├── WorldClosed             the world was closed, or never formed
 ├── CallMismatch            ranks make different calls as the same one of a group (mock worlds say so at once)
 ├── WorldStuck              no rank of a mock world can go on
 └── NcclError               NCCL is not there, or refuses
"""

from __future__ import annotations

from axon_nb.errors import UsageError

__all__ = [
    "CallMismatch",
    "CommError",
    "InvalidRank",
    "NcclError",
    "NotInGroup",
    "TensorError",
    "TensorMismatch",
    "WorldClosed",
    "WorldStuck",
]


class CommError(UsageError):
    """A communication call that cannot be made; the message gives the value, the rule and the fix."""


class InvalidRank(CommError):
    """A rank that the group does not have."""


class NotInGroup(CommError):
    """This rank is no member of the group."""


class TensorError(CommError):
    """A tensor that the operation cannot take."""


class TensorMismatch(TensorError):
    """Ranks bring tensors that do not fit together."""


class WorldClosed(CommError):
    """The world was closed, or never formed."""


class CallMismatch(CommError):
    """Ranks make different calls as the same one of a group."""


class WorldStuck(CommError):
    """No rank of a mock world can go on: each waits for another."""


class NcclError(CommError):
    """NCCL is not there, or refuses."""
