"""Flags that halve the time of XLA's CPU compiler, for programs that are small and run once."""

from importlib import metadata

XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# XLA ends the process at an unknown flag; this one was removed in jaxlib 0.11.
if tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"
