"""What values consist of, and digests of it."""
