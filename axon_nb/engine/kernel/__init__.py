"""The rank's IPython kernel: cells, streams, interrupts, tracebacks."""
