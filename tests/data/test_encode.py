"""Encoding: a text by hand, and several processes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data.clean import CleanConfig
from data.conversation import Text
from data.encode import Encoder
from data.report import Report
from data.sources import Source, read
from data.tokenizer import Tokenizer
from tests.conftest import REPOSITORY

# Ctrl-C to all processes, as from a terminal, while the first one imports its modules.
INTERRUPTED = """
import os, signal, sys, time
from data.conversation import Text
from data.encode import BATCH, Encoder, encode_all
from data.tokenizer import Tokenizer
from trainer import entry

def records():
    yield from (Text(str(number), "a text") for number in range(BATCH))
    time.sleep(0.4)
    os.killpg(0, signal.SIGINT)
    time.sleep(60)

encoder = Encoder(("",), Tokenizer.load("data/fixtures/tiny_tokenizer"), 64)
sys.exit(entry.run(lambda: list(encode_all(encoder, records(), processes=2))))
"""


def test_ctrl_c_while_several_processes_tokenize_is_one_line(repository):
    finished = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
        check=False,
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (130, "", "stopped\n")


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them(tmp_path):
    """A killed process cannot end those that it has started."""
    code = (
        "import itertools, os; from data.conversation import Text; from data.encode import Encoder, encode_all\n"
        "from data.tokenizer import Tokenizer\n"
        "if __name__ == '__main__':\n"
        "    encoder = Encoder((), Tokenizer.load('data/fixtures/tiny_tokenizer'), 64)\n"
        "    for number, _ in enumerate(encode_all(encoder, itertools.repeat(Text('a', 'text')), 2)):\n"
        "        if number == 1000: print('at work', flush=True)\n"
    )
    path = tmp_path / "work.py"
    path.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(path)]
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "at work\n"
        children = [
            int(number)
            for number in Path(f"/proc/{process.pid}/task/{process.pid}/children")
            .read_text()
            .split()
        ]
        process.kill()
    assert len(children) >= 2
    deadline = time.monotonic() + 20
    while alive := [child for child in children if Path(f"/proc/{child}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)


def test_a_texts_tokens_and_which_are_trained_on(repository):
    """One BOS, the text, EOS; after a prompt of 5 characters only what goes beyond it, and EOS."""
    tokenizer = Tokenizer.load(repository / "data/fixtures/tiny_tokenizer")
    spans = tokenizer.encode_spans("Hello there, you")
    ids = [tokenizer.bos_id, *spans.ids, tokenizer.eos_id]
    encoder = Encoder(("plain",), tokenizer, 64, add_bos=(True,))
    for prompt, mask in (
        (0, [1] * len(ids)),
        (5, [0, *(int(end > 5) for _, end in spans.offsets), 1]),
    ):
        (document,) = encoder.encode(Text("a", "Hello there, you", prompt=prompt)).documents
        assert document.tokens.tolist() == ids and document.loss_mask.tolist() == mask
    assert any(end == 5 for _, end in spans.offsets), "a token ends with the prompt"


def test_a_records_variables_reach_its_template_and_precede_the_recipes(tmp_path):
    """A template that writes `mood` after each turn; what is no dictionary is not read, and
    counted."""
    path = tmp_path / "talks.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    records = [
        {"id": "own", "messages": turns, "chat_template_kwargs": {"mood": "x"}},
        {"id": "recipe's", "messages": turns},
        {"id": "no dictionary", "messages": turns, "chat_template_kwargs": "x"},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = Tokenizer.load("data/fixtures/tiny_tokenizer").with_template_kwargs({"mood": "y"})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ mood }}{% endfor %}"
    report = Report()
    talks = read(Source(path), report, clean=CleanConfig(duplicates=False))
    encoder = Encoder(("tokenizer",), tokenizer, 64)
    texts = [
        tokenizer.decode(encoder.encode(talk).documents[0].tokens, skip_control=False)
        for talk in talks
    ]
    assert [text.strip() for text in texts] == ["axbx", "ayby", "ayby"]
    assert report.sources[0].unread == {"record field `chat_template_kwargs`": 1}
