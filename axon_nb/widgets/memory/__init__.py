"""The memory view."""
