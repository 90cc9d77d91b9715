"""Run a cell on ranks, from its source to its result."""
