"""Everything that runs on a rank: joining the group, cells, requests from the notebook. Imports torch."""

from __future__ import annotations
