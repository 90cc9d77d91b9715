"""Horovod's elastic API, which is not supported: every name raises and says what to use instead."""

from __future__ import annotations

from typing import NoReturn

from axon_nb.compat.horovod.runtime.errors import NotSupportedError

__all__: list[str] = []


def __getattr__(name: str) -> NoReturn:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise NotSupportedError(
        f"hvd.elastic.{name} is not supported: in a notebook run `%distributed repair` to replace a dead rank; "
        "`axon_nb.parallel.Checkpoints` resumes a run on any number of ranks."
    )
