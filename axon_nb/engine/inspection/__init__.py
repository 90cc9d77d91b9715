"""Rank side of `axon_nb.cluster.inspection`: answers its requests."""
