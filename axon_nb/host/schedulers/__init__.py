"""Programs that use the client of another scheduler, Ray's or Kubernetes', so that the notebook's process does not."""
