"""What `make soak` runs: the slow tests in parts, attacks on what users and machines can do wrong,
and an hour of training."""
