"""Commands that measure this project, and that compare it with what the papers print."""
