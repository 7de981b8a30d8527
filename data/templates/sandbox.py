"""Jinja as transformers runs it, bounded in the work that a template may do."""
from functools import lru_cache
from typing import TYPE_CHECKING

from data.errors import UserError

if TYPE_CHECKING:
    from jinja2 import Template

# Iterations that a template may make for one conversation; those of published models make a few for each turn.
STEPS = 1_000_000
STEPS_PER_TURN = 1_000


@lru_cache(maxsize=32)
def compile_template(source: str) -> "Template":
    """Compiles a template in the same Jinja environment as transformers', without strftime_now.

    Templates that would print today's date then print their fixed one.

    Raises:
      UserError: it is not Jinja, or too large to be compiled.
    """
    from jinja2 import TemplateSyntaxError

    from data.templates.environment import make_environment

    try:
        return make_environment().from_string(source)
    except TemplateSyntaxError as error:
        raise UserError(f"the tokenizer's chat template is not Jinja: line {error.lineno}: {error.message}") from None
    except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:  # of the compiler, or of constants
        raise UserError(f"the tokenizer's chat template cannot be compiled ({type(error).__name__})") from None
