"""Commands that measure this project and compare it with the papers' numbers."""
