"""After a failure: recover groups and replace ranks."""
