"""Which cluster this notebook has: start one, find one, reattach to one."""
