"""The working tree, variables and shell commands that a slice's workers receive.

On a worker the project is in ~/longstripe. One command (the job) at a time runs there, detached
from the connection that started it. The files job.log, job.pid, job.code (its exit code, once it
has ended) and job.command describe it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .gcloud import Refused

ROOT = Path(__file__).resolve().parents[2]
LARGEST_UNTRACKED = 10 * 2**20  # bytes; a larger file is stray data, not code


def files_to_send(root: Path = ROOT) -> list[str]:
    """Returns the files that git tracks or would add, without ignored ones.

    Raises:
      Refused: an untracked file is too large for code, or this is not a git working tree.
    """

    def listed(*options: str) -> list[str]:
        done = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z", *options],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Refused(
                f"{root} is not a git working tree, so it is unknown which files to send: "
                f"{done.stderr.strip()}"
            )
        return [name for name in done.stdout.split("\0") if name]

    new = listed("--others", "--exclude-standard")
    for name in new:
        if (size := (root / name).lstat().st_size) > LARGEST_UNTRACKED:
            raise Refused(
                f"{name} ({size / 2**20:.0f} MiB) would be sent to every worker: add it to "
                ".gitignore, or git add it"
            )
    return sorted({name for name in [*listed("--cached"), *new] if os.path.lexists(root / name)})


def write_archive(path: Path, root: Path = ROOT) -> None:
    """Writes the files to send as a tar archive. Raises Refused."""
    names = files_to_send(root)
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.add(root / name, arcname=name, recursive=False)


def check_recipe(command: Sequence[str], root: Path = ROOT) -> None:
    """Raises Refused for a recipe that would not reach the workers, before slices are paid for.

    An absolute path, or one in a bucket, is read on the workers and not checked.
    """
    for index, word in enumerate(command):
        flag, _, recipe = word.partition("=")
        if flag != "--config":
            continue
        recipe = recipe or (command[index + 1] if index + 1 < len(command) else "")
        if not recipe or recipe.startswith("/") or "://" in recipe:
            continue
        if not (root / recipe).exists():
            raise Refused(f"--config: there is no {recipe} in {root}")
        if os.path.normpath(recipe) not in files_to_send(root):
            raise Refused(f"--config: {recipe} is ignored by git and would not reach the workers")


def environment_file(variables: Mapping[str, str]) -> str:
    """Returns the shell lines that set the variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def read_variables(given: Sequence[str]) -> dict[str, str]:
    """Returns the variables of --env NAME=VALUE and --env NAME. Raises Refused."""
    variables = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise Refused(
                f"--env: found {word.partition('=')[0]}; expected NAME=VALUE, or the NAME of a "
                "variable that is set here"
            )
        if not equals and name not in os.environ:
            raise Refused(f"--env: {name} is not set here")
        variables[name] = value if equals else os.environ[name]
    return variables


def words_to_run(command: Sequence[str]) -> list[str]:
    """Returns the workers' Python arguments: train.py with options, or another command.

    Raises:
      Refused: it is neither.
    """
    words = list(command)
    if words and words[0].startswith("--"):
        return ["train.py", *words]
    if words and re.fullmatch(r"(\.venv/bin/)?python3?", words[0]):
        words = words[1:]
    if words[:1] == ["train.py"]:
        return words
    if (
        words[:1] == ["-m"]
        and len(words) > 1
        and words[1].split(".")[0] in ("scripts", "eval", "trainer", "data", "planning")
    ):
        return words
    raise Refused(
        "no command was given; after --, pass train.py's options, such as -- --config "
        "configs/NAME.yaml, or a command of the project, such as -- python -m scripts.export_hf "
        "RUN HF_DIR"
    )


def on_all_workers(words: Sequence[str]) -> bool:
    """Returns whether all processes run a command together: training and evaluation."""
    return words[0] == "train.py" or (words[0] == "-m" and words[1].startswith("eval."))


# Files that only the previous installation sent are removed first: Python would still import them.
INSTALL = """set -e
mkdir -p longstripe
tar -tzf longstripe.tar.gz | sort > longstripe.sent
if [ -e longstripe/.sent ]; then
  comm -23 longstripe/.sent longstripe.sent | (cd longstripe && xargs -r -d '\\n' rm -f --)
fi
tar -xzf longstripe.tar.gz -C longstripe
mv longstripe.sent longstripe/.sent
cd longstripe
[ -x ~/.local/bin/uv ] || curl -LsSf https://astral.sh/uv/install.sh | sh
[ -x .venv/bin/python ] || ~/.local/bin/uv venv --python 3.12
lock=requirements-tpu.lock
[ -e $lock ] || lock=requirements-tpu.txt
~/.local/bin/uv pip install --quiet -r $lock"""

# setsid: the job gets its own process group, so that only its own signals end it.
_JOB = '.venv/bin/python "$@" >> job.log 2>&1; echo $? > job.code'


def start_command(words: Sequence[str], variables: Mapping[str, str]) -> str:
    """Returns the shell command that starts a job on a worker, unless it is running.

    It fails if another job is running, or the compiler's flags are not available.
    """
    line = shlex.join(words)
    return f"""set -e
cd longstripe
if [ -e job.pid ] && [ ! -e job.code ] && kill -0 "$(cat job.pid)" 2> /dev/null; then
  [ "$(cat job.command)" = {shlex.quote(line)} ] && exit 0
  echo "ERROR: another command is running there: $(cat job.command)" >&2; exit 3
fi
rm -f job.code
flags=$(.venv/bin/python -m trainer.xla_flags tpu)
eval "$flags"
{environment_file(variables)}if [ -e ~/longstripe.env ]; then . ~/longstripe.env; fi
printf '%s' {shlex.quote(line)} > job.command
date +%s%N > job.id
: > job.log
setsid bash -c {shlex.quote(_JOB)} job {line} < /dev/null > /dev/null 2>&1 &
echo $! > job.pid"""


STOPPED_CODE = 130
# The leader of the process group ends at once, the program after saving.
STOP = f"""cd longstripe 2> /dev/null || exit 0
if [ -e job.pid ] && [ ! -e job.code ]; then
  group=$(cat job.pid)
  kill -- -"$group" 2> /dev/null || true
  while kill -0 -- -"$group" 2> /dev/null; do sleep 1; done
  echo {STOPPED_CODE} > job.code
fi"""

# One line: the job's id, its command's checksum, its exit code or `running` or `lost`; nothing
# without a job.
JOB = """cd longstripe 2> /dev/null && [ -e job.id ] || exit 0
if [ -e job.code ]; then code=$(cat job.code)
elif kill -0 "$(cat job.pid)" 2> /dev/null; then code=running
else code=lost; fi
echo "job $(hostname) $(cat job.id) $(cksum < job.command | cut -d ' ' -f 1) $code" """


def log_command(identity: str, offset: int) -> str:
    """Returns a command that prints the job's id, then its log from `offset` to the end."""
    return (
        f'cd longstripe && start=1; [ "$(cat job.id)" != "{identity}" ] || start={offset + 1}\n'
        'cat job.id; tail -c +$start --pid="$(cat job.pid)" -f job.log'
    )


# The end of each worker's log, each line prefixed by host and exit code.
ENDS = """cd longstripe && code=$(cat job.code 2> /dev/null || echo running)
tail -n 20 job.log | sed "s/^/end $(hostname) $code|/"; echo"""
