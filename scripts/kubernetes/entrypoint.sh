#!/usr/bin/env bash
# What a container does: train.py with its arguments, under the compiler's flags of the image's platform.
set -euo pipefail
platform=${PLATFORM:?tpu or cuda, as the image was built for}
eval "$(.venv/bin/python -m trainer.xla_flags "${platform/cuda/gpu}")"
exec .venv/bin/python train.py "$@"
