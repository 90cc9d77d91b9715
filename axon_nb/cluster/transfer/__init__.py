"""Moves values between the notebook and the ranks; `axon_nb.engine.transfer` is the other end."""
