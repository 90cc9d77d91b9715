"""The timeline of spans."""
