"""A process group of ranks on one host, over memory that they share: no sockets, and every wait can be ended."""
