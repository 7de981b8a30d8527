"""What launch_tpu is made of: gcloud's calls, slices, and the commands that run on their workers. No dependency but Python."""
