"""Values in the rows of a table, as JSON lines of the same rows would hold them.

Columns of JSON texts, which `datasets` writes for values of mixed types, are decoded. Structs are
marked, because each has the keys of all rows, with None for those that its own row lacks. Maps,
which Arrow gives as lists of pairs, become dictionaries.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

Decode = Callable[[Any], Any]
_JSON = "arrow.json"  # Arrow's name for the type
_LISTS = ("List", "LargeList", "Sequence")  # of `datasets`, around the type of their elements


class Struct(dict):
    """A struct of a table; a key that its row lacks and another row has is None in it."""


def without_unused(value: Any) -> tuple[Any, bool]:
    """Returns a value without the keys of structs that are None, and whether there were any.

    None in JSON stays.
    """
    left_out: list[str] = []

    def without(value: Any) -> Any:
        if isinstance(value, Struct):
            left_out.extend(name for name, item in value.items() if item is None)
            return {name: without(item) for name, item in value.items() if item is not None}
        return [without(item) for item in value] if isinstance(value, list) else value

    try:
        return without(value), bool(left_out)
    except RecursionError:  # lists in JSON, which nest deeper than a table's types
        return value, False


def decoders(schema: "pyarrow.Schema") -> dict[str, Decode]:
    """Returns what decodes the Python values of columns with JSON, structs or maps, at any depth.

    A decoder raises ValueError or RecursionError for a text that is not JSON.
    """
    features = _features(schema)
    found = {field.name: _decoder(field, features.get(field.name)) for field in schema}
    return {name: decode for name, decode in found.items() if decode is not None}


def _features(schema: "pyarrow.Schema") -> dict[str, Any]:
    """Returns the types of columns that `datasets` notes in a table; empty without such a note."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def _decoder(field: "pyarrow.Field", feature: Any) -> Decode | None:
    """Returns what decodes a field's values, None if nothing has to be.

    Args:
      field: the field of a table, a struct or a list.
      feature: its type as `datasets` notes it, if known.
    """
    import pyarrow
    from pyarrow import types

    form = field.type
    if _is_json(field, feature):
        return lambda text: json.loads(text) if isinstance(text, str) else text
    if isinstance(form, pyarrow.BaseExtensionType):
        return _decoder(field.with_type(form.storage_type), feature)
    if types.is_dictionary(form) or types.is_run_end_encoded(form):
        return _decoder(field.with_type(form.value_type), feature)
    if types.is_struct(form):
        parts = feature if isinstance(feature, dict) else {}
        inner = {child.name: _decoder(child, parts.get(child.name)) for child in form}
        return _struct_decoder({name: decode for name, decode in inner.items() if decode})
    if types.is_map(form):
        return _map_decoder(_decoder(form.item_field, None))
    if (inner_field := getattr(form, "value_field", None)) is not None:
        item = _decoder(inner_field, _element(feature))
        return item and (lambda entries: entries and [item(entry) for entry in entries])
    return None


def _map_decoder(item: Decode | None) -> Decode:
    def decode(pairs: list[tuple[Any, Any]] | None) -> dict | list | None:
        if pairs is None:
            return None
        decoded = [(key, item(value) if item else value) for key, value in pairs]
        keys = [key for key, _ in decoded]
        is_plain = all(isinstance(key, str) for key in keys) and len({*keys}) == len(keys)
        return dict(decoded) if is_plain else decoded

    return decode


def _is_json(field: "pyarrow.Field", feature: Any) -> bool:
    """Returns whether a field's texts are JSON.

    An Arrow that lacks the type keeps its name in the field's metadata; a file may also have lost
    it, except for the note of `datasets`.
    """
    named = (field.metadata or {}).get(b"ARROW:extension:name")
    return (
        getattr(field.type, "extension_name", None) == _JSON
        or named == _JSON.encode()
        or (isinstance(feature, dict) and feature.get("_type") == "Json")
    )


def _element(feature: Any) -> Any:
    """Returns the type of a list's elements, if `datasets` notes the list's."""
    if isinstance(feature, list):
        return feature[0] if feature else None
    is_list = isinstance(feature, dict) and feature.get("_type") in _LISTS
    return feature.get("feature") if is_list else None


def _struct_decoder(inner: dict[str, Decode]) -> Decode:
    def decode(value: dict | None) -> Struct | None:
        if value is None:
            return None
        struct = Struct(value)
        for name, decode_item in inner.items():
            struct[name] = decode_item(struct[name])
        return struct

    return decode
