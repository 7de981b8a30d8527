"""The launcher's processes do not wait for a reader of their messages."""

import os
import subprocess
import sys

from scripts import launch_local


def test_processes_go_on_when_nobody_reads_their_messages():
    """As with `2>&1 | head`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    stderr = os.dup(2)
    talks = "import sys; sys.stderr.write('a line\\n' * 50_000)"  # more than a pipe holds
    with subprocess.Popen([sys.executable, "-c", talks], stderr=subprocess.PIPE) as process:
        os.dup2(write_end, 2)
        try:
            launch_local._forward_stderr(process, process)
        finally:
            os.dup2(stderr, 2)
            for end in (stderr, write_end):
                os.close(end)
            process.kill()
    assert process.returncode == 0
