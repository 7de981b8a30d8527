"""What `make soak` runs: the slow tests in parts, attacks that imitate mistakes of users and faults
of machines, and an hour of training."""
