"""What this machine and installation can do, what is amiss and how to mend it; and clusters that were left."""

from __future__ import annotations

__all__: list[str] = []
