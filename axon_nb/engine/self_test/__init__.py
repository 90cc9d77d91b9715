"""Tests whether the private hooks work with the installed versions: once per build, for real, instead of assuming it.

Each capability has a check that does what a failing cell would need, in its own processes (`checks`). The verdict is
cached per build of torch, Python and axon_nb (`verdict`). A start reads it, and `axon-nb doctor` shows it.
"""

from __future__ import annotations

from axon_nb.engine.self_test.verdict import build, start_in_child, startup_verdict

__all__ = ["build", "start_in_child", "startup_verdict"]
