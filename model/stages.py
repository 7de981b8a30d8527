"""The stages of a layer, by which it is run in pieces: each parameter declares which of them read
it."""

# Queries; keys and values; attention itself; and what follows attention.
QUERIES, KEYS_VALUES, ATTENTION, OUTPUT = STAGES = (
    "queries",
    "keys_values",
    "attention",
    "output",
)
