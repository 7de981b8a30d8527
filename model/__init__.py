"""The computation: the model, its attention, its sharding. Knows nothing of users, data sets or
loops."""
