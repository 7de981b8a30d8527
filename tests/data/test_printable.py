import io
import shlex
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from data.printable import _Output, console, printable, printable_output

ATTACKS = {
    "clears the screen": "\x1b[2J\x1b[H",
    "sets the title": "\x1b]0;title\x07",
    "writes the clipboard": "\x1b]52;c;aGk=\x07",
    "8-bit control sequence": "\x9b2J",
    "carriage return": "all is well\rerror",
    "backspace": "abc\x08\x08\x08xyz",
    "right-to-left override": "user\u202etxt.exe",
    "isolate": "a\u2066b\u2069",
    "half a surrogate pair": "\ud83d",
    "null": "a\0b",
}


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS)
def test_control_characters_are_replaced(text):
    shown = printable(text)
    assert len(shown) == len(text)
    assert "\ufffd" in shown and not any(unicodedata.category(c) in ("Cc", "Cs") for c in shown)
    assert not set(shown) & set("\u202e\u2066\u2069")


@given(st.text())
def test_other_characters_are_unchanged(text):
    pairs = zip(text, printable(text), strict=True)
    assert all(
        a == b or unicodedata.category(a) in ("Cc", "Cs", "Cf", "Zl", "Zp") for a, b in pairs
    )


def test_any_script_and_joined_emoji_are_unchanged():
    text = "naïve 日本語 עברית\tfamily: 👩\u200d👩\u200d👧\nsoft\u00adhyphen"
    assert printable(text) == text


EVIL = "".join(ATTACKS.values())


def test_printed_output_is_printable(capsys):
    """Through print, warnings and a rich console, whose own colours stay."""
    with printable_output():
        print(EVIL)
        print(EVIL, file=sys.stderr)
        console().print("\x1b[2J\u202e", markup=False)
        console(force_terminal=True, color_system="standard").print(
            Text("colour\x1b]0;t", "red"), end=""
        )
        with printable_output():
            print("\rbar", end="\n")
    out, err = capsys.readouterr()
    assert out.split("\n") == [
        printable(EVIL),
        "\ufffd[2J\ufffd",
        "\x1b[31mcolour\ufffd]0;t\x1b[0m\rbar",
        "",
    ]
    assert err == printable(EVIL) + "\n"
    assert not isinstance(sys.stdout, _Output)


def test_characters_missing_in_the_encoding_are_replaced(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    with printable_output():
        print("bar █ ⟦")
        console().print("bar █ ⟦")
    assert stream.buffer.getvalue() == b"bar ? ?\n" * 2


def test_a_full_disk_behind_an_output_is_named_once(repository, monkeypatch):
    """Not as the command's own output; and what cannot be written to standard error is dropped."""
    program = (
        "import sys\nfrom trainer import entry\n"
        "def work():\n    print('a', file=sys.stderr, flush=True)\n    print('b')\n"
        "sys.exit(entry.run(work, '/my/output'))"
    )
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    for redirection, code, said in (
        (
            ">/dev/full",
            75,
            "a\nerror: standard output: No space left on device; with more room there, or "
            "another place for it, the same command would work\n",
        ),
        ("2>/dev/full", 0, ""),
    ):
        command = f"{shlex.join([sys.executable, '-c', program])} {redirection}"
        process = subprocess.run(
            command, shell=True, cwd=repository, capture_output=True, text=True, check=False
        )
        assert (process.returncode, process.stderr) == (code, said)


@pytest.mark.parametrize("printing", ["print('x' * 99)", "console().print('x' * 99)"])
def test_a_closed_pipe_is_not_an_error(repository, printing):
    program = (
        "from data.printable import printable_output, console\nimport sys\nsys.stdin.read()\nwith printable_output():\n"
        f"    for _ in range(500): {printing}\n    print('at the end', file=sys.stderr)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=repository,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    _, errors = process.communicate("")
    assert (process.returncode, errors) == (0, "at the end\n")
