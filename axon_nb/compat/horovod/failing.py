"""Communication that fails because a rank is gone, and what ranks tell each other about a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from axon_nb.comm import ProcessGroup
from axon_nb.compat.horovod.errors import HorovodInternalError

__all__ = ["carried", "told"]


@contextlib.contextmanager
def carried(kind: str, name: str = "") -> Iterator[None]:
    """What torch raises within it when a connection breaks becomes Horovod's error.

    Types of their own, such as those that end a cell, are left alone.

    Raises:
        HorovodInternalError: the communication failed.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        what = f"hvd.{kind} {name!r}" if name else f"Horovod's {kind}"
        first = str(error).strip().splitlines()[-1][-200:]
        raise HorovodInternalError(
            f"{what} failed, as a rank has ended or is out of reach ({first}); its own error says why."
        ) from error


def told(group: ProcessGroup, value: Any) -> list[Any]:
    """What every rank of the group has to say, in the order of ranks; collective."""
    said: list[Any] = [None] * group.size()
    dist.all_gather_object(said, value, group=group.torch_group)
    return said
