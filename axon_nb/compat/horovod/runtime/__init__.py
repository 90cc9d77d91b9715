"""What Horovod's API runs on: negotiation, transfers, state."""
