"""Start engines on hosts and join them into a world."""
