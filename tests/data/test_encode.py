"""Tokenizing in several processes."""
import subprocess
import sys

# Ctrl-C to all, as a terminal sends it, while the first process imports what it needs.
INTERRUPTED = """
import os, signal, sys, time
from data.conversation import Text
from data.encode import BATCH, Encoder, encode_all
from data.tokenizer import Tokenizer
from trainer import entry

def items():
    yield from (Text(str(number), "a text") for number in range(BATCH))
    time.sleep(0.4)
    os.killpg(0, signal.SIGINT)
    time.sleep(60)

encoder = Encoder(("",), Tokenizer.load("data/fixtures/tiny_tokenizer"), 64)
sys.exit(entry.run(lambda: list(encode_all(encoder, items(), processes=2))))
"""


def test_ctrl_c_while_several_processes_tokenize_is_one_line(repository):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=repository, capture_output=True, text=True, timeout=120,
                          start_new_session=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")
