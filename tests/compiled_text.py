"""What the tests look for in compiled texts beside what planning.compiled reads from them."""

import re


def arrays_with(text: str, size: int) -> set[str]:
    """Arrays in a compiled text with two axes of at least `size`: what attention must not keep
    between passes."""
    return {
        match[0]
        for match in re.finditer(r"\b(?:pred|bf16|[suf]\d+|c64|c128|f8\w+)\[([\d,]*)\]", text)
        if sum(int(axis) >= size for axis in match[1].split(",") if axis) >= 2
    }
