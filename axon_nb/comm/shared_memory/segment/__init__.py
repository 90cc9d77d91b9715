"""The memory that the ranks of a group share, and what stands in it: progress, announcements, rings for messages."""
