"""Encoding in several processes."""
import subprocess
import sys

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
    finished = subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=repository, capture_output=True, text=True, timeout=120,
                              start_new_session=True, check=False)
    assert (finished.returncode, finished.stdout, finished.stderr) == (130, "", "stopped\n")
