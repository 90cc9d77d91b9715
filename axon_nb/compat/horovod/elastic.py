"""Horovod's elastic API, which is not here: every name of it says what to use instead."""

from __future__ import annotations

from typing import NoReturn

from axon_nb.compat.horovod.errors import NotSupportedError

__all__: list[str] = []


def __getattr__(name: str) -> NoReturn:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise NotSupportedError(
        f"hvd.elastic.{name} is not supported: in a notebook `%distributed repair` replaces a rank that died, and "
        "`axon_nb.parallel.Checkpoints` resumes a run on any number of ranks."
    )
