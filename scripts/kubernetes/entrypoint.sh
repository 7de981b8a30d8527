#!/usr/bin/env bash
# Runs train.py with the container's arguments, or another command of the project where they do not begin with an option, such as
# `-m scripts.export_hf RUN HF_DIR` after `python`. On GPUs PLAN=FILE names the plan whose memory JAX may take. With STARTS=FILE,
# in storage that all starts share, it counts the starts that bring no new checkpoint, and ends with 2 after too many (RESTARTS).
set -euo pipefail
python=${PYTHON:-.venv/bin/python}
platform=${PLATFORM:?tpu or cuda, as the image was built for}
# A command that fails inside `eval` alone would go unnoticed.
flags=$("$python" -m trainer.xla_flags "${platform/cuda/gpu}" ${PLAN:+--plan "$PLAN"})
eval "$flags"
if [[ ${1:-} == python ]]; then
  exec "$python" "${@:2}"
fi
# The first pod of the first slice counts for all; where storage does not answer just now, as a start without a checkpoint.
if [[ -n ${STARTS:-} && ${JOB_COMPLETION_INDEX:-0} == 0 && ${SLICE:-0} == 0 ]]; then
  checkpoint=$("$python" -m scripts.run_status --checkpoint "$@") || checkpoint=
  "$python" -m scripts.restarts "$STARTS" --checkpoint "$checkpoint" --longest-pause 120 ${RESTARTS:+--limit "$RESTARTS"}
fi
exec "$python" train.py "$@"
