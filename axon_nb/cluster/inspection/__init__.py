"""Requests to ranks about what they do and hold; `axon_nb.engine.inspection` answers them."""
