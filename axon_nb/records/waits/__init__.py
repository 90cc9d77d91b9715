"""What ranks wait for: their calls in progress, deadlocks, slow ranks and silent ones."""
