"""The memory that rows of a table take once their values are Python objects."""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np
from jaxtyping import Float

if TYPE_CHECKING:
    import pyarrow

    Sizes = Float[np.ndarray, " n"] | float


def may_repeat(schema: "pyarrow.Schema") -> bool:
    """Returns whether rows may take more memory than their buffers.

    A text in a dictionary, a view or a run is stored once for any number of rows.
    """
    return any(_may_repeat(field.type) for field in schema)


def row_bytes(batch: "pyarrow.RecordBatch") -> Float[np.ndarray, " rows"]:
    """Returns the bytes of each row, at least one, counting every value as often as it occurs.

    The count is never too low, and infinite or NaN if it exceeds a float.
    """
    total = sum((_sizes(column) for column in batch.columns), 1.0)
    return np.broadcast_to(total, batch.num_rows)


def _may_repeat(form: "pyarrow.DataType") -> bool:
    from pyarrow import types

    if types.is_struct(form) and form.num_fields:  # without fields it has no buffers
        return any(_may_repeat(field.type) for field in form)
    if types.is_list(form) or types.is_large_list(form):
        return _may_repeat(form.value_type)
    return not (types.is_primitive(form) or _is_text(form))


def _is_text(form: "pyarrow.DataType") -> bool:
    import pyarrow

    return form in (
        pyarrow.string(),
        pyarrow.large_string(),
        pyarrow.binary(),
        pyarrow.large_binary(),
    )


def check_offsets(batch: "pyarrow.RecordBatch") -> None:
    """Raises pyarrow.ArrowInvalid unless every offset of a batch is within it.

    Arrow follows others unchecked, which can crash the process.
    """
    import pyarrow

    for column in batch.columns:
        try:
            column.validate(full=True)
        except pyarrow.ArrowInvalid:  # possibly for text that is not UTF-8: check as bytes
            column.view(_without_texts(column.type)).validate(full=True)


def _without_texts(form: "pyarrow.DataType") -> "pyarrow.DataType":
    """Returns a type with texts replaced by bytes."""
    import pyarrow
    from pyarrow import types

    for text, binary in (
        (pyarrow.string(), pyarrow.binary()),
        (pyarrow.large_string(), pyarrow.large_binary()),
        (pyarrow.string_view(), pyarrow.binary_view()),
    ):
        if form == text:
            return binary
    if types.is_dictionary(form):
        return pyarrow.dictionary(form.index_type, _without_texts(form.value_type), form.ordered)
    return _with_inner(form, _without_texts)


def without_dictionaries(form: "pyarrow.DataType") -> "pyarrow.DataType":
    """Returns a type with dictionaries replaced by their values, also in lists and structs."""
    from pyarrow import types

    return form.value_type if types.is_dictionary(form) else _with_inner(form, without_dictionaries)


def _with_inner(
    form: "pyarrow.DataType", changed: "Callable[[pyarrow.DataType], pyarrow.DataType]"
) -> "pyarrow.DataType":
    """Applies `changed` to the types inside a list or struct type."""
    import pyarrow
    from pyarrow import types

    if types.is_struct(form):
        return pyarrow.struct([field.with_type(changed(field.type)) for field in form])
    if types.is_list(form) or types.is_large_list(form):
        inner = form.value_field.with_type(changed(form.value_type))
        return (pyarrow.list_ if types.is_list(form) else pyarrow.large_list)(inner)
    return form


def _sizes(array: "pyarrow.Array") -> "Sizes":
    """Returns the bytes of each value, or one number for all."""
    import pyarrow
    from pyarrow import compute, types

    form = array.type
    if isinstance(form, pyarrow.BaseExtensionType):
        return _sizes(array.storage)
    if types.is_dictionary(form):
        inner = _sizes(array.dictionary)
        if isinstance(inner, float):
            return inner
        indices = array.indices.cast(pyarrow.int64()).fill_null(len(inner))
        return np.append(inner, 0.0)[indices.to_numpy()]
    if types.is_run_end_encoded(form):
        return _largest(_sizes(array.values))
    if types.is_union(form):
        return max((_largest(_sizes(array.field(i))) for i in range(form.num_fields)), default=1.0)
    if types.is_struct(form):
        return sum((_sizes(array.field(number)) for number in range(form.num_fields)), 1.0)
    if types.is_nested(form):
        return _list_sizes(array)
    if types.is_string_view(form) or types.is_binary_view(form):
        # A view is four words, the first of which is the length.
        words = np.frombuffer(array.buffers()[1] or b"", np.int32)[::4]
        return words[array.offset :][: len(array)] + 16.0
    if types.is_null(form):
        return 1.0
    try:
        return float(form.bit_width // 8 or 1)
    except ValueError:  # a text
        lengths = compute.binary_length(array).fill_null(0)
        return lengths.to_numpy(zero_copy_only=False) + 4.0


def _list_sizes(array: "pyarrow.Array") -> "Sizes":
    """Returns the bytes of each list, as differences of cumulative sums over the values."""
    from pyarrow import types

    form = array.type
    if types.is_fixed_size_list(form):
        count = form.list_size
        inner = _sizes(array.values.slice(array.offset * count, len(array) * count))
        if isinstance(inner, float):
            return inner * count
        return inner.reshape(len(array), count).sum(axis=1)
    starts = array.offsets.to_numpy()
    if types.is_list_view(form) or types.is_large_list_view(form):
        ends, base = starts + array.sizes.to_numpy(), 0
        values = [array.values]
    else:
        starts, ends, base = starts[:-1], starts[1:], starts[0]
        children = [array.keys, array.items] if types.is_map(form) else [array.values]
        length = (ends[-1] if len(ends) else base) - base
        values = [child.slice(base, length) for child in children]
    inner = sum(map(_sizes, values))
    if isinstance(inner, float):
        return inner * (ends - starts) + 4.0
    sums = np.append(0.0, np.cumsum(inner))
    return cast("Sizes", sums[ends - base] - sums[starts - base] + 4.0)


def _largest(sizes: "Sizes") -> float:
    return float(np.max(sizes, initial=0.0))
