"""RL in one process (or one per device): the loop, and what its parts do."""
