"""Predictions in a process of their own."""
