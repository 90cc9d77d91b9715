"""Snapshots of all ranks, as the notebook asks for them."""
