#!/usr/bin/env bash
# Runs train.py with the container's arguments and the compiler flags of the image's platform; on GPUs PLAN=FILE names the plan
# whose memory JAX may take.
set -euo pipefail
platform=${PLATFORM:?tpu or cuda, as the image was built for}
eval "$(.venv/bin/python -m trainer.xla_flags "${platform/cuda/gpu}" ${PLAN:+--plan "$PLAN"})"
exec .venv/bin/python train.py "$@"
