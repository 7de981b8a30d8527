"""Jinja as transformers runs it, with a limit on a template's work."""

import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from data.errors import UserError

if TYPE_CHECKING:
    from jinja2 import Template

# A template's work limit for one conversation: a fixed amount, plus an amount per turn or other
# value in it and per character. A step is about four parts of an expression, or 100 characters of a
# text. Published models' templates take some hundred steps per turn.
STEPS = 200_000
STEPS_PER_VALUE = 5_000
MAX_SOURCE = 50_000  # characters of a template; the longest of published models have 20,000


class Compiled(NamedTuple):
    """A compiled chat template, and facts about its text."""

    template: "Template"
    needles: frozenset[str]
    """Texts that it looks for in others."""
    only_writes: bool
    """Whether it only writes contents, see data.templates.outline."""


@lru_cache(maxsize=32)
def compile_template(source: str) -> Compiled:
    """Compiles a template in the same Jinja environment as transformers'.

    Raises:
      UserError: it is not Jinja, too large to compile, or uses something not allowed.
    """
    from jinja2 import TemplateSyntaxError

    from data.templates.environment import Environment

    if len(source) > MAX_SOURCE:
        raise UserError(
            f"the tokenizer's chat template has {len(source):,} characters; up to {MAX_SOURCE:,} "
            "would work"
        )
    try:
        with warnings.catch_warnings():  # Python's own, about expressions that make no sense
            warnings.simplefilter("ignore")
            environment = Environment()
            template = environment.from_string(source)
            return Compiled(template, environment.needles, environment.only_writes)
    except TemplateSyntaxError as error:
        raise UserError(
            f"the tokenizer's chat template is not Jinja: line {error.lineno}: {error.message}"
        ) from None
    except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
        # Of the compiler, or of constants.
        raise UserError(
            f"the tokenizer's chat template cannot be compiled ({type(error).__name__})"
        ) from None


@lru_cache(maxsize=32)
def variables_of(source: str) -> frozenset[str]:
    """Returns the variables read by a template that `compile_template` accepts."""
    from jinja2.meta import find_undeclared_variables

    from data.templates.environment import Environment

    return frozenset(find_undeclared_variables(Environment().parse(source)))
