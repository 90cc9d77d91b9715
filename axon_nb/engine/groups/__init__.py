"""The process groups of a rank: formed, owned and told apart here alone."""

from __future__ import annotations

from axon_nb.engine.groups.install import init_default_group

__all__ = ["init_default_group"]
