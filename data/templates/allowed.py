"""What chat templates may use. Anything not listed here is refused by name."""

from typing import NoReturn

from jinja2 import nodes

from data.templates.errors import TemplateError

# Those of the published templates of TRL and of the model families.
ALLOWED_FILTERS = frozenset(
    [
        "capitalize",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "float",
        "format",
        "indent",
        "int",
        "items",
        "join",
        "last",
        "length",
        "list",
        "lower",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "replace",
        "reverse",
        "safe",
        "select",
        "selectattr",
        "sort",
        "string",
        "title",
        "tojson",
        "trim",
        "unique",
        "upper",
    ]
)
ALLOWED_TESTS = frozenset(
    [
        "!=",
        "<",
        "<=",
        "==",
        ">",
        ">=",
        "boolean",
        "defined",
        "divisibleby",
        "eq",
        "equalto",
        "even",
        "false",
        "float",
        "ge",
        "gt",
        "in",
        "integer",
        "iterable",
        "le",
        "lt",
        "mapping",
        "ne",
        "none",
        "number",
        "odd",
        "sequence",
        "string",
        "true",
        "undefined",
    ]
)
LOOP_ATTRIBUTES = ("first", "last", "index", "index0", "previtem", "nextitem")  # the usual ones
OTHER_FUNCTIONS = ("cycler", "joiner", "lipsum")  # Jinja's own, which no published template calls
METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (
        str,
        frozenset(
            [
                "capitalize",
                "count",
                "endswith",
                "find",
                "format",
                "index",
                "isalnum",
                "isalpha",
                "isdecimal",
                "isdigit",
                "islower",
                "isnumeric",
                "isspace",
                "isupper",
                "join",
                "lower",
                "lstrip",
                "partition",
                "removeprefix",
                "removesuffix",
                "replace",
                "rfind",
                "rpartition",
                "rsplit",
                "rstrip",
                "split",
                "splitlines",
                "startswith",
                "strip",
                "title",
                "upper",
            ]
        ),
    ),
    (dict, frozenset(["copy", "get", "items", "keys", "values"])),
    (list, frozenset(["copy", "count", "index"])),
    (tuple, frozenset(["count", "index"])),
)
TAGS = (
    nodes.Template,
    nodes.Output,
    nodes.TemplateData,
    nodes.For,
    nodes.If,
    nodes.Macro,
    nodes.CallBlock,
    nodes.FilterBlock,
    nodes.With,
    nodes.Assign,
    nodes.AssignBlock,
    nodes.ExprStmt,
    nodes.Break,
    nodes.Continue,
    nodes.Scope,
)
NAMES_OF_TAGS = {nodes.ScopedEvalContextModifier: "autoescape", nodes.FromImport: "from"}


def refuse(kind: str, name: str) -> NoReturn:
    """Raises TemplateError for what a template uses, such as a filter, by its name."""
    raise TemplateError(f"the chat template uses the {kind} {name[:60]}, which is not allowed")
