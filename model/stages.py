"""The stages of a layer, which may run separately: each parameter declares the ones that read
it."""

# Queries; keys and values; attention itself; and what follows attention.
QUERIES, KEYS_VALUES, ATTENTION, OUTPUT = STAGES = (
    "queries",
    "keys_values",
    "attention",
    "output",
)
