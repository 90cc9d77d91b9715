"""Benchmarks against peers in the same run; each module writes a table and JSON. See `make bench`."""

from __future__ import annotations
