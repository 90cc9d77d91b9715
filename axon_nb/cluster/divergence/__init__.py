"""`config watch_numbers`: where replicas first differ, and where the first number that is not finite arose."""
