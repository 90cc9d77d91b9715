"""Starting engines on hosts and joining them into a world."""
