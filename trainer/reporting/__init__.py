"""What a run reports: metrics, TensorBoard and Weights & Biases, profiles."""
