"""The host agent: one small process per host that forks ranks, serves their rendezvous store and outlives the kernel.

Standard library only. The agent process imports torch and the engine by name, so that ranks have them, but never uses
them.
"""

from __future__ import annotations
