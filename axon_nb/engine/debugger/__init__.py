"""Debuggers of a rank: on its last failure, and where a running cell stops."""
