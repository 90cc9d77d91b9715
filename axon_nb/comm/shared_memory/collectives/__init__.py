"""The collectives of a group over shared memory: announced, then moved piece by piece."""
