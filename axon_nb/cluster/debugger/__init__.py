"""The notebook's side of the ranks' debuggers: reads commands and sends them to a rank."""
