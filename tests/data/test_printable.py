import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.printable import printable

ATTACKS = {
    "clears the screen": "\x1b[2J\x1b[H", "sets the title": "\x1b]0;title\x07", "writes the clipboard": "\x1b]52;c;aGk=\x07",
    "8-bit control sequence": "\x9b2J", "carriage return": "all is well\rerror", "backspace": "abc\x08\x08\x08xyz",
    "right-to-left override": "user\u202etxt.exe", "isolate": "a\u2066b\u2069",
    "half a surrogate pair": "\ud83d", "null": "a\0b",
}


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS)
def test_nothing_that_a_terminal_obeys_stays(text):
    shown = printable(text)
    assert len(shown) == len(text)
    assert "\ufffd" in shown and not any(unicodedata.category(c) in ("Cc", "Cs") for c in shown)
    assert not set(shown) & set("\u202e\u2066\u2069")


@given(st.text())
def test_other_characters_stay_as_they_are(text):
    pairs = zip(text, printable(text), strict=True)
    assert all(a == b or unicodedata.category(a) in ("Cc", "Cs", "Cf", "Zl", "Zp") for a, b in pairs)


def test_words_of_any_script_and_joined_emoji_stay():
    text = "naïve 日本語 עברית\tfamily: 👩\u200d👩\u200d👧\nsoft\u00adhyphen"
    assert printable(text) == text
