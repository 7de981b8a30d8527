"""Importing a module of ours sets no environment variable or signal handler, and queries no device."""

import json
import subprocess
import sys

from tests.test_rooms import ROOT, code_files, module_of

# Imports the modules on its command line; prints the environment variables, and the signals and
# hooks, that this has changed, and whether it has queried the devices.
PROGRAM = """
import importlib, json, os, signal, sys

def state():
    handlers = {str(number): signal.getsignal(number) for number in signal.valid_signals()}
    hooks = {"excepthook": sys.excepthook, "wakeup_fd": signal.set_wakeup_fd(-1)}
    return dict(os.environ), {**handlers, **hooks}

def changed(before, after):
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]

before, modules = state(), sys.argv[1:]
for module in modules:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:  # of an optional package
        assert error.name.split(".")[0] not in {name.split(".")[0] for name in modules}, error
found = list(map(changed, before, state()))
from jax._src import xla_bridge
print(json.dumps([*found, xla_bridge.backends_are_initialized()]))
"""


def test_importing_a_module_has_no_side_effects():
    modules = [module for path in code_files() if not (module := module_of(path)).endswith("__")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    variables, hooks, queried = json.loads(done.stdout)
    code = "".join(path.read_text(encoding="utf-8") for path in code_files())
    assert [name for name in variables if name in code] == [], "libraries may set others"
    assert (hooks, queried) == ([], False)
