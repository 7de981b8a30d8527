"""JAX's interpreter of Mosaic GPU kernels, with which tests run `mosaic`; JAX keeps it in private
modules.

It runs a kernel's three warpgroups as threads, with barriers and with copies between arrays that
stand for the memories of a GPU; a read that races with a write is an error. It compiles a kernel
again for each thread of each block, which takes most of its time; `compile_once` caches what it
compiles.
"""

import contextlib
import threading

import jax
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from model.attention.kernels import MosaicKernel

KERNEL = MosaicKernel(interpret=InterpretGPUParams(detect_races=True))


@contextlib.contextmanager
def compile_once(monkeypatch):
    """Compiles an interpreted kernel once for all its threads and blocks; checks afterwards that no
    read raced."""
    lock, programs = threading.Lock(), {}

    def run(jaxpr, consts, *args):
        with lock:
            if id(jaxpr) not in programs:

                def program(consts, *args):
                    jax.core.eval_jaxpr(jaxpr, consts, *args)

                programs[id(jaxpr)] = jaxpr, jax.jit(program).lower(consts, *args).compile()
        programs[id(jaxpr)][1](consts, *args)

    monkeypatch.setattr(thread_map, "_run_jaxpr", run)
    try:
        yield
        assert not programs or not gpu_callbacks.get_races().races_found
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
