"""What is known of a cluster's ranks, and what follows when one dies or their number changes."""
