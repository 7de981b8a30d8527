"""What a training job takes on machines that are not at hand: plans by the real compilers, and estimated times."""
