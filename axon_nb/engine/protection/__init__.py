"""Protection: the state of this rank after its last steps, in memory that outlives the rank."""
