"""Tracked texts: every operation gives Python's result, and each character comes from the source
that its run names."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.templates.errors import TemplateError
from data.templates.meter import meter
from data.templates.runs import Source
from data.templates.tracked import Tracked, concat, percent, text_of, track
from data.templates.tracked_json import to_json

TEXT = st.text(alphabet="ab <>/\n\té'\"\\&", max_size=12)
PLACES = st.integers(-14, 14) | st.none()


def tracked(*texts):
    """Returns the joined texts, each from a separate source, separated by the template's own
    text."""
    meter.left = 10_000_000
    pieces = []
    for number, text in enumerate(texts):
        pieces += [
            Tracked(text, [(len(text), Source(number, "content", text), 0)] if text else []),
            "|",
        ]
    return concat(pieces)


def check(result, plain):
    """Asserts that a result equals Python's, and that each of its characters comes from its named
    source."""
    assert str.__str__(result) == plain
    position = 0
    for length, source, offset in getattr(result, "runs", [(len(plain), None, 0)] * bool(plain)):
        if source is not None and offset is not None:
            assert (
                source.text[offset : offset + length].lower()
                == plain[position : position + length].lower()
            )
        position += length
    assert position == len(plain)


def check_all(results, plain):
    assert len(results) == len(plain)
    for result, expected in zip(results, plain, strict=True):
        check(result, expected)


@settings(max_examples=300, deadline=None)
@given(
    TEXT,
    TEXT,
    st.text(alphabet="ab<> \n", min_size=1, max_size=2),
    st.integers(-1, 3),
    PLACES,
    PLACES,
    st.sampled_from([None, 1, 2, -1, -3]),
)
def test_every_operation_gives_pythons_result(first, second, other, count, start, stop, step):
    text = tracked(first, second)
    plain = str.__str__(text)
    check(text[start:stop:step], plain[start:stop:step])
    for name, arguments in [
        ("strip", ()),
        ("lstrip", ()),
        ("rstrip", ()),
        ("strip", (other,)),
        ("lstrip", (other,)),
        ("rstrip", (other,)),
        ("removeprefix", (other,)),
        ("removesuffix", (other,)),
        ("replace", (other, "<x>")),
        ("replace", (other, "", count)),
        ("upper", ()),
        ("lower", ()),
        ("title", ()),
        ("capitalize", ()),
    ]:
        check(getattr(text, name)(*arguments), getattr(plain, name)(*arguments))
    for name, arguments in [
        ("split", ()),
        ("rsplit", ()),
        ("split", (None, count)),
        ("rsplit", (None, count)),
        ("split", (other, count)),
        ("rsplit", (other, count)),
        ("splitlines", ()),
        ("splitlines", (True,)),
        ("partition", (other,)),
        ("rpartition", (other,)),
    ]:
        check_all(getattr(text, name)(*arguments), getattr(plain, name)(*arguments))
    for name in ("startswith", "endswith", "find", "rfind", "count"):
        assert getattr(text, name)(other) == getattr(plain, name)(other)
    check_all(list(text), list(plain))
    check(text + other, plain + other)
    check(other + text, other + plain)
    check(text * 2, plain * 2)
    check(text.join([other, text, "x"]), plain.join([other, plain, "x"]))
    check(percent(Tracked("a%s%%%d"), (text, 3)), f"a{plain}%3")
    check(Tracked("{}-{1}{a}").replace("1", "").format(text, 5, a=text), f"{plain}-5{plain}")


JSON = st.recursive(
    TEXT | st.integers() | st.booleans() | st.none() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(
    JSON,
    st.sampled_from([None, 0, 2, "\t"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, (",", ":"), (" ; ", " = ")]),
)
def test_json_and_printed_values_match_python(value, indent, ascii_only, sort_keys, separators):
    meter.left = 10_000_000
    tracked_value = track(value, 0, "content", [])
    options = {
        "ensure_ascii": ascii_only,
        "indent": indent,
        "separators": separators,
        "sort_keys": sort_keys,
    }
    check(to_json(tracked_value, **options), json.dumps(value, **options))
    check(text_of(tracked_value), str(value))


def test_untrackable_operations_are_refused():
    text = tracked("straße")
    with pytest.raises(TemplateError, match="changes the letters"):
        text.upper()
    with pytest.raises(TemplateError, match="empty text"):
        text.replace("", "x")
    for form in ("%5s", "%x", "%(a)s"):
        with pytest.raises(TemplateError, match="by % with a width"):
            percent(Tracked(form), (text,))
    for form in ("{:5}", "{0.a}", "{!r}", "{0[1]}"):
        with pytest.raises(TemplateError, match="a width or an attribute"):
            Tracked(form).format(text)
    meter.left = 1_000
    with pytest.raises(TemplateError, match="does not end"):
        text * 10_000_000
