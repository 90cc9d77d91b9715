"""The rank's end of `axon_nb.cluster.transfer`."""
