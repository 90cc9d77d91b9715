"""The rank's side of `axon_nb.cluster.transfer`."""
