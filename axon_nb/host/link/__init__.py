"""Join the agents of several hosts: authenticated TCP connections, and the two ends of each."""
