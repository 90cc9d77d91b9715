"""Requests to ranks over ipyparallel's channels."""
