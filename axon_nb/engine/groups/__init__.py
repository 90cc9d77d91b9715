"""The process groups of a rank; the only place that creates, owns and distinguishes them."""

from __future__ import annotations

from axon_nb.engine.groups.creation import init_default_group

__all__ = ["init_default_group"]
