"""Checks of a field's value: one line that names the field, what was found, what it needs."""


def require(valid: bool, field: str, value: object, needs: str) -> None:
    """Raises ValueError, `field: found value, needs ...`, unless `valid`."""
    if not valid:
        raise ValueError(f"{field}: found {value!r}, needs {needs}")


def require_at_least(section: object, name: str, minimum: int, *fields: str) -> None:
    """Raises ValueError for the first of the section's fields that is below the minimum."""
    for field in fields:
        value = getattr(section, field)
        require(value >= minimum, f"{name}.{field}", value, f"at least {minimum}")
