"""The configuration of a run: its schema, loading, and rules beyond types."""
