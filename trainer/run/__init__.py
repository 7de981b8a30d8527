"""A run's folder and processes: files, lock, cluster, preemption."""
