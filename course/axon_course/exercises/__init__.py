"""The exercises of the course, by notebook."""
