"""Answers to what `axon_nb.cluster.inspection` asks of a rank."""
