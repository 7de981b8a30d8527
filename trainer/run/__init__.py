"""A run's folder and processes: paths, lock, cluster, notice of preemption."""
