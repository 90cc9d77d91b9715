"""Which shards of a tensor this rank holds."""
