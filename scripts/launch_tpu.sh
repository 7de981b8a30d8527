#!/usr/bin/env bash
# Trains on a TPU slice of Google Cloud, from creating it to stopping it:
#
#   scripts/launch_tpu.sh run NAME --zone Z --type v5p-128 --version V [--spot] [...] -- --config configs/R.yaml [...]
#   scripts/launch_tpu.sh create|install|start|follow|stop|delete NAME --zone Z [...]
#
# run      create, install, start and follow; after a preemption all of it again, and training goes on where it was
# create   a queued resource, unless it is there already; waits until it is active
# install  this working tree (what git tracks), a Python of its own (by uv: the images' is too old) and its requirements, on every
#          worker
# start    train.py with what stands after --, on every worker, unless it runs already
# follow   worker 0's log until training ends; exits with train.py's exit code
# stop     ends training, which saves the step it is in
# delete   gives the slice back
#
#   --project P        instead of gcloud's own
#   --setup COMMAND    runs on every worker before the installation, such as mounting the file system that all share: the
#                      run's folder (--run_dir) and data.prepared must lie on one
#   --poll SECONDS     between looks at the slice's state (default 30)
set -euo pipefail

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }
fail() { echo "error: $*" >&2; exit 2; }
say() { echo "launch_tpu: $*" >&2; }

[[ ${1:-} != -h && ${1:-} != --help ]] || { usage; exit 0; }
[[ $# -ge 2 && $2 != --* ]] || fail "needs a verb and the slice's name, such as: scripts/launch_tpu.sh run NAME --zone ZONE ..."
verb=$1 name=$2
shift 2
zone='' type='' version='' project='' setup='' spot=() poll=30 train=()
# Exit codes: what training stopped by `stop` has, what train.py gives when it saved on SIGTERM, and `follow` when the slice is
# no longer there.
stopped=130 preempted=143 gone=75
while [[ $# -gt 0 ]]; do
  case $1 in
    --spot) spot=(--spot); shift ;;
    --) shift; train=("$@"); break ;;
    --zone | --type | --version | --project | --setup | --poll)
      [[ $# -ge 2 ]] || fail "$1 needs a value"
      printf -v "${1#--}" '%s' "$2"; shift 2 ;;
    *) fail "unknown option $1; train.py's own stand after --" ;;
  esac
done
[[ -n $zone ]] || fail "--zone is missing, such as --zone us-east5-a"

where=(--zone "$zone")
[[ -z $project ]] || where+=(--project "$project")
queued() { gcloud compute tpus queued-resources "$@" "${where[@]}"; }
# The slice itself has the queued resource's name.
workers() { gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=all --command "$1"; }
first() { gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=0 --command "$1"; }
state() { queued describe "$name" --format 'value(state.state)' 2>/dev/null || echo ABSENT; }

delete() {
  # --force also deletes the slice that belongs to it.
  [[ $(state) == ABSENT ]] || queued delete "$name" --force --quiet
}

create() {
  [[ -n $type && -n $version ]] || fail "--type and --version are missing, such as --type v5p-128 --version v2-alpha-tpuv5"
  local now
  while now=$(state); [[ $now != ACTIVE ]]; do
    case $now in
      SUSPENDED | FAILED) say "$name is $now (preempted, or no capacity): another is asked for"; delete ;;
      ABSENT)
        say "asking for $type as $name"
        queued create "$name" --node-id "$name" --accelerator-type "$type" --runtime-version "$version" ${spot[@]+"${spot[@]}"} ;;
      *) say "$name is $now"; sleep "$poll" ;;
    esac
  done
}

# In `run` these two are conditions, where bash ignores `set -e`: hence the returns.
install() {
  local archive root sent=''
  root=$(dirname "${BASH_SOURCE[0]}")/..
  [[ -z $setup ]] || workers "$setup" || return
  archive=$(mktemp "${TMPDIR:-/tmp}/longstripe.XXXXXX")
  if git -C "$root" ls-files -z | tar --null -C "$root" -czf "$archive" --files-from -; then
    gcloud compute tpus tpu-vm scp "$archive" "$name:longstripe.tar.gz" "${where[@]}" --worker=all && sent=1
  fi
  rm -f "$archive"
  [[ $sent ]] || return
  workers 'mkdir -p longstripe && tar -xzf longstripe.tar.gz -C longstripe && cd longstripe &&
    { [ -x ~/.local/bin/uv ] || curl -LsSf https://astral.sh/uv/install.sh | sh; } &&
    { [ -x .venv/bin/python ] || ~/.local/bin/uv venv --python 3.12; } &&
    ~/.local/bin/uv pip install --quiet -r requirements-tpu.txt'
}

# What stands in single quotes from here on is expanded on the workers.
# shellcheck disable=SC2016
start() {
  local options launch
  [[ ${#train[@]} -gt 0 ]] || fail "nothing to start: train.py's options stand after --, such as -- --config configs/NAME.yaml"
  options=$(printf ' %q' "${train[@]}")
  # setsid lets training outlive the connection; the file with the exit code says that it ended.
  launch='setsid bash -c '\''.venv/bin/python train.py "$@" > train.log 2>&1; echo $? > train.code'\'" train.py$options"
  workers 'cd longstripe && if [ ! -e train.pid ] || ! kill -0 "$(cat train.pid)" 2> /dev/null; then rm -f train.code
    eval "$(.venv/bin/python -m trainer.xla_flags tpu)"
    '"$launch"' < /dev/null > /dev/null 2>&1 & echo $! > train.pid; fi'
}

# shellcheck disable=SC2016
follow() {
  local code
  while [[ $(state) == ACTIVE ]]; do
    # Ends with training; or earlier, where the connection is lost, and then the loop looks again.
    first 'cd longstripe && touch train.log && tail -n 100 --pid="$(cat train.pid)" -F train.log 2> /dev/null' || true
    code=$(first 'cat longstripe/train.code 2> /dev/null') || code=''
    if [[ $code =~ ^[0-9]+ ]]; then
      say "train.py ended with ${BASH_REMATCH[0]}"
      return "${BASH_REMATCH[0]}"
    fi
    sleep "$poll"
  done
  return "$gone"
}

# shellcheck disable=SC2016
stop() {
  # The group's leader ends at once, train.py when it has saved.
  workers 'cd longstripe && if [ -e train.pid ]; then group=$(cat train.pid); kill -- -"$group"
    while kill -0 -- -"$group" 2> /dev/null; do sleep 1; done; rm -f train.pid; echo '"$stopped"' > train.code; fi'
}

run() {
  local code deaths=0
  while true; do
    create
    if install && start; then
      code=0
      follow || code=$?
      if [[ $code -lt 128 && $code != "$gone" || $code == "$stopped" ]]; then
        exit "$code"
      elif [[ $code == "$preempted" ]]; then
        sleep "$poll"
      elif [[ $code != "$gone" ]]; then
        # Killed by a signal: the slice is being taken away, though its state may not say so yet; or it was out of memory.
        deaths=$((deaths + 1))
        [[ $deaths -lt 3 ]] || exit "$code"
        sleep "$poll"
      fi
    elif [[ $(state) == ACTIVE ]]; then
      fail "the installation failed on a slice that is active: see above"
    fi
    say "beginning again from the last checkpoint"
  done
}

case $verb in
  run | create | install | start | follow | stop | delete) "$verb" ;;
  *) fail "unknown verb $verb; run, create, install, start, follow, stop and delete are known" ;;
esac
