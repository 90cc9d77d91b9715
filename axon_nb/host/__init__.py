"""The host agent: one small process a host that forks ranks, serves their rendezvous store and outlives the kernel.

Standard library only; torch and the engine are imported by name in the agent process, never used there.
"""

from __future__ import annotations
