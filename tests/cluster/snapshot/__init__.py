"""Cells that are taken back, and runs from the same state."""
