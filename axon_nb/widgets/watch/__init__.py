"""Training metrics, live."""
