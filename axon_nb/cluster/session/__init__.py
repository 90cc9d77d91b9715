"""The session of a notebook, and its cluster: start one, find one, reattach to one."""
