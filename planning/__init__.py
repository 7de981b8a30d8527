"""What a training job needs on absent machines: plans by their compilers, estimated times."""
