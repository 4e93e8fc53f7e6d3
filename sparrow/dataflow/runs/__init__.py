"""What a training run leaves behind: checkpoints, metrics, actions, rollouts."""
