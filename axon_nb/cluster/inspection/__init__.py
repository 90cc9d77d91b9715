"""Asking ranks what they do and hold; `axon_nb.engine.inspection` answers."""
