"""Collectives on arrays and tensors."""
