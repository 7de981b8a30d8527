"""The parts of launch_tpu: gcloud calls, slices, commands on workers. Needs only Python."""
