"""What this process may use: cores, memory and GPUs."""
