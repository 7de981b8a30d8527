"""Ranges and segments of a rendered conversation, against checking every character and token."""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from data.templates.encoder import (
    Control,
    _add_range,
    _any_overlap,
    _segments,
    encode,
    find_controls,
    overlapping,
)
from data.tokenizer import Tokenizer
from tests.data.test_tokenizer import with_added

TEXT = "abc de fgh the end of it all  and more words come here"


@st.composite
def in_order(draw, most=54):
    """Draws ordered, non-empty ranges, which may touch."""
    cuts = sorted(draw(st.sets(st.integers(0, most), max_size=10)))
    parts = list(pairwise(cuts))
    kept = draw(st.lists(st.booleans(), min_size=len(parts), max_size=len(parts)))
    return [part for part, keep in zip(parts, kept, strict=True) if keep]


def overlap(a, b):
    return bool(set(range(*a)) & set(range(*b)))


@settings(max_examples=200, deadline=None)
@given(in_order(20), in_order(20))
def test_overlaps_match_sets_of_positions(ranges, others):
    assert _any_overlap(ranges, others) == any(overlap(a, b) for a in ranges for b in others)
    for other in others:
        assert list(overlapping(ranges, *other)) == [a for a in ranges if overlap(a, other)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4))), st.integers(0, 12))
def test_segments_are_runs_of_equal_masks(parts, count):
    """Ranges are added in order of their starts; they may touch, overlap or be empty."""
    ranges = []
    expected = [False] * 20
    for start, length in sorted(parts):
        _add_range(ranges, start, start + length)
        expected[start : start + length] = [True] * length
    ids = list(range(100, 100 + 13 + count))[:20]
    segments = _segments(ids, [part for part in ranges if part[1] <= len(ids)])
    assert [token for segment in segments for token in segment.ids] == ids
    assert [segment.train for segment in segments for _ in segment.ids] == expected[: len(ids)]
    assert all(a.train != b.train for a, b in pairwise(segments)) and all(s.ids for s in segments)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load("data/fixtures/tiny_tokenizer")


@settings(max_examples=100, deadline=None)
@given(trained=in_order(), place=st.integers(0, len(TEXT) - 3), width=st.integers(1, 3))
def test_a_token_is_trained_on_if_any_of_its_characters_are(tokenizer, trained, place, width):
    """Text on both sides of one control token, each side encoded separately."""
    control = Control(place, place + width, place, place + width, tokenizer.eos_id)
    segments = encode(SimpleNamespace(text=TEXT), [control], trained, tokenizer)
    expected = []
    for start, end in ((0, place), (place + width, len(TEXT))):
        if start:
            expected.append((tokenizer.eos_id, any(overlap(t, (place, start)) for t in trained)))
        spans = tokenizer.encode_spans(TEXT[start:end], start == 0)
        for token, (a, b) in zip(spans.ids, spans.offsets, strict=True):
            # A token without characters counts as the character that follows.
            places = (start + a, start + max(b, a + 1))
            expected.append((token, any(overlap(t, places) and t[0] < end for t in trained)))
    assert [(token, s.train) for s in segments for token in s.ids] == expected


# Added tokens by whether they remove the white space to their left and right, as Phi-3's roles do.
STRIPPING = {
    "<none>": (False, False),
    "<left>": (True, False),
    "<right>": (False, True),
    "<both>": (True, True),
}


# Marks spaces, also one that it puts before the text's first word, as LLaMA's tokenizers do.
MARKING = {"type": "Metaspace", "replacement": "Z", "prepend_scheme": "first", "split": False}


@pytest.fixture(scope="module", params=[None, MARKING], ids=["bytes", "marks"])
def stripping(request, tmp_path_factory):
    """A tokenizer with these tokens, and the tokenizers library's of the same file."""
    folder = with_added(tmp_path_factory.mktemp("stripping") / "in", STRIPPING)
    spec = json.loads((folder / "tokenizer.json").read_text())
    for token in spec["added_tokens"]:
        token["lstrip"], token["rstrip"] = STRIPPING.get(token["content"], (False, False))
    spec["pre_tokenizer"] = request.param or spec["pre_tokenizer"]
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return Tokenizer.load(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["a", "be", " ", "\n", "  ", *STRIPPING]), max_size=8))
def test_tokens_that_strip_white_space_match_tokenizers(stripping, pieces):
    """The ids of a template's text are those that the tokenizers library gives it."""
    tokenizer, library = stripping
    text = "".join(pieces)
    rendered = SimpleNamespace(text=text, runs=[(len(text), None, None)], needles=frozenset())
    segments = encode(rendered, find_controls(rendered, tokenizer).controls, [], tokenizer)
    expected = library.encode(text, add_special_tokens=False).ids
    assert [token for segment in segments for token in segment.ids] == expected
