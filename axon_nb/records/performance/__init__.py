"""What a step's time is made of: deliberate slowness, the replay of a recorded step, and what would shorten it."""
