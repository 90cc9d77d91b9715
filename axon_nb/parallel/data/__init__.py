"""Data parallelism: DDP, FSDP, ZeRO."""
