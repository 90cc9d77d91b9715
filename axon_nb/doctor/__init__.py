"""`axon-nb doctor` and `axon-nb list`/`stop`: diagnosis of machine and installation; detached clusters."""

from __future__ import annotations

__all__: list[str] = []
