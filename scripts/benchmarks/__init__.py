"""Commands that measure this project and compare it with the papers' numbers.

`python -m scripts.benchmarks` measures what is stale and writes the pages. A command with several
modules is a folder.

- Results and pages: results, freshness, measurements, summaries, gpu_summary, page; commands is
  shared by all others.
- Speed on a CPU: bench_step with torch_step, bench_kernels, rings, bench_schedules, shared_prompts.
- Data and checkpoints: bench_data, bench_engines, bench_packing, checkpoint_stores.
- Kernels, by compilers: kernel_cycles, kernel_registers; on a GPU: kernel_exactness, kernel_parts.
- A session with a GPU: gpu_call, gpu_results, bench_qlora; a step's trace: step_trace, step_parts.
- Plans: evidence, plan_store, stored_plans, adapter_contexts, table3, papers, measured_steps.
- What models learn: identity, preference, curriculum, extension, retrieval, gemma3, in_context,
  exploration.
"""
