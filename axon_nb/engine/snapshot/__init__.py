"""Snapshots: the state of this rank's session, to be restored bit for bit."""
