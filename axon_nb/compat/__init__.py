"""Horovod's API, and what other frameworks need set on ranks."""

from __future__ import annotations

__all__: list[str] = []
