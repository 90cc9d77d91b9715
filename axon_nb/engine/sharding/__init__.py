"""Which part of a sharded tensor this rank holds."""
