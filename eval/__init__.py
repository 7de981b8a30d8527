"""What the model can do now: line retrieval and its report."""
