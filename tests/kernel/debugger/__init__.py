"""Debuggers on ranks, driven by the notebook's input."""
