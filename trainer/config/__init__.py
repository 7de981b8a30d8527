"""The configuration of a run: its schema, how it is read, and the rules that its types cannot express."""
