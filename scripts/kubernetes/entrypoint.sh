#!/usr/bin/env bash
# Runs train.py with the container's arguments, or another command of the project if the first argument is `python`, such as
# `python -m scripts.export_hf RUN HF_DIR`. On GPUs PLAN=FILE names the plan whose memory JAX may take. With STARTS=FILE, in
# storage that all starts share, it counts the starts without a new checkpoint, and exits with 2 after too many (RESTARTS).
set -euo pipefail
python=${PYTHON:-.venv/bin/python}
platform=${PLATFORM:?expected tpu or cuda, the platform of the image}
# A command that fails inside `eval` alone would go unnoticed.
flags=$("$python" -m trainer.xla_flags "${platform/cuda/gpu}" ${PLAN:+--plan "$PLAN"})
eval "$flags"
if [[ ${1:-} == python ]]; then
  exec "$python" "${@:2}"
fi
# The first pod of the first slice counts for all. If storage does not answer, the start counts as one without a checkpoint.
if [[ -n ${STARTS:-} && ${JOB_COMPLETION_INDEX:-0} == 0 && ${SLICE:-0} == 0 ]]; then
  checkpoint=$("$python" -m scripts.run_status --checkpoint "$@") || checkpoint=
  "$python" -m scripts.restarts "$STARTS" --checkpoint "$checkpoint" --longest-pause 120 ${RESTARTS:+--limit "$RESTARTS"}
fi
exec "$python" train.py "$@"
