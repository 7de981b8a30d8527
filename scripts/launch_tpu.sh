#!/usr/bin/env bash
# Trains on TPU slices of Google Cloud: scripts/launch_tpu.sh --help. It needs Python 3.11 or newer here, and gcloud.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -x $here/.venv/bin/python ]]; then
  python=$here/.venv/bin/python
fi
PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m scripts.launch_tpu "$@"
