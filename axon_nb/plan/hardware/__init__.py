"""Links and rates of known hardware."""
