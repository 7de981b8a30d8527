"""Numbers of tokens as people write them: 4096, 64K, 1M."""

import re
from typing import Any

FORM = "a number of tokens such as 4096, 64K or 1M"
_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "b": 1 << 30}
_WRITTEN = re.compile(r"([+-]?\d+(?:\.\d*)?)([kmgb]?)", re.ASCII)


def tokens_of(text: str) -> int:
    """Returns a number of tokens: 4096, 64K, 1M, 1_048_576. K and M are 2^10 and 2^20.

    Raises:
        ValueError: not a whole number.
    """
    plain = text.strip().replace(",", "").replace("_", "").lower()
    if (match := _WRITTEN.fullmatch(plain)) and len(plain) < 32:
        value = float(match[1]) * _FACTORS[match[2]]
        if value == int(value):
            return int(value)
    raise ValueError(f"found {text}; write {FORM}")


def with_lengths(fields: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Returns nested fields with these names' values as numbers, even if written 64K. Other texts
    stay, to be refused by code that knows the fields."""

    def number(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return with_lengths(value, names)
        if name in names and isinstance(value, str):
            try:
                return tokens_of(value)
            except ValueError:
                return value
        return value

    return {name: number(name, value) for name, value in fields.items()}
