#!/usr/bin/env bash
# Trains on a TPU slice of Google Cloud. It creates and installs the slice; `delete` deletes it, which `run` does not do when
# training has ended:
#
#   scripts/launch_tpu.sh run NAME --zone Z --type v5p-128 --version V [--spot] [...] -- --config configs/R.yaml [...]
#   scripts/launch_tpu.sh create|install|start|follow|stop|delete NAME --zone Z [...]
#
# run      does create, install, start and follow, and after a preemption all of them again; training resumes
# create   creates a queued resource, unless it exists, and waits until it is active
# install  installs on every worker the files of this working tree that git tracks, Python (by uv, since the images' Python is
#          too old) and the requirements
# start    starts train.py, with the options after --, on every worker, unless it is running
# follow   prints worker 0's log until training ends; exits with train.py's exit status
# stop     stops training, which saves a checkpoint of the current step
# delete   deletes the slice
#
#   --project P        project, if not gcloud's default
#   --setup COMMAND    runs on every worker before the installation, for example to mount a shared file system, which must
#                      contain the run's folder (--run_dir) and data.prepared
#   --poll SECONDS     time between checks of the slice's state (default 30)
set -euo pipefail

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }
fail() { echo "error: $*" >&2; exit 2; }
say() { echo "launch_tpu: $*" >&2; }

[[ ${1:-} != -h && ${1:-} != --help ]] || { usage; exit 0; }
[[ $# -ge 2 && $2 != --* ]] || fail "needs a verb and the slice's name, such as: scripts/launch_tpu.sh run NAME --zone ZONE ..."
verb=$1 name=$2
shift 2
zone='' type='' version='' project='' setup='' spot=() poll=30 train=()
# Exit statuses: of training ended by `stop`, of train.py after saving on SIGTERM, and of `follow` when the slice is gone.
stopped=130 preempted=143 gone=75
while [[ $# -gt 0 ]]; do
  case $1 in
    --spot) spot=(--spot); shift ;;
    --) shift; train=("$@"); break ;;
    --zone | --type | --version | --project | --setup | --poll)
      [[ $# -ge 2 ]] || fail "$1 needs a value"
      printf -v "${1#--}" '%s' "$2"; shift 2 ;;
    *) fail "unknown option $1; train.py's options follow after --" ;;
  esac
done
[[ -n $zone ]] || fail "--zone is missing, such as --zone us-east5-a"

where=(--zone "$zone")
[[ -z $project ]] || where+=(--project "$project")
queued() { gcloud compute tpus queued-resources "$@" "${where[@]}"; }
# The slice has the same name as the queued resource.
workers() { gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=all --command "$1"; }
first() { gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=0 --command "$1"; }
state() { queued describe "$name" --format 'value(state.state)' 2>/dev/null || echo ABSENT; }

delete() {
  # --force also deletes its slice.
  [[ $(state) == ABSENT ]] || queued delete "$name" --force --quiet
}

create() {
  [[ -n $type && -n $version ]] || fail "--type and --version are missing, such as --type v5p-128 --version v2-alpha-tpuv5"
  local now
  while now=$(state); [[ $now != ACTIVE ]]; do
    case $now in
      SUSPENDED | FAILED) say "$name is $now (preempted, or no capacity): requesting another one"; delete ;;
      ABSENT)
        say "requesting $type as $name"
        queued create "$name" --node-id "$name" --accelerator-type "$type" --runtime-version "$version" ${spot[@]+"${spot[@]}"} ;;
      *) say "$name is $now"; sleep "$poll" ;;
    esac
  done
}

# The workers get the files that git tracks: a recipe just written would be missed there, once the slice is paid for. An
# absolute path may be on a file system that --setup mounts.
check_recipe() {
  local recipe='' root index
  root=$(dirname "${BASH_SOURCE[0]}")/..
  for index in "${!train[@]}"; do
    case ${train[index]} in
      --config) recipe=${train[index + 1]:-} ;;
      --config=*) recipe=${train[index]#--config=} ;;
    esac
  done
  [[ -n $recipe && $recipe != /* ]] || return 0
  [[ -e $root/$recipe ]] || fail "--config: there is no $recipe in $(cd "$root" && pwd)"
  git -C "$root" ls-files --error-unmatch -- "$recipe" > /dev/null 2>&1 ||
    fail "$recipe is not tracked by git and would not reach the workers: git add $recipe"
}

# `run` uses install and start as conditions, in which bash ignores `set -e`; therefore they return explicitly.
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

# Text in single quotes below is expanded on the workers.
# shellcheck disable=SC2016
start() {
  local options launch
  check_recipe
  [[ ${#train[@]} -gt 0 ]] || fail "nothing to start: train.py's options follow after --, such as -- --config configs/NAME.yaml"
  options=$(printf ' %q' "${train[@]}")
  # With setsid, training outlives the connection; the file train.code shows that it has ended.
  launch='setsid bash -c '\''.venv/bin/python train.py "$@" > train.log 2>&1; echo $? > train.code'\'" train.py$options"
  workers 'cd longstripe && if [ ! -e train.pid ] || ! kill -0 "$(cat train.pid)" 2> /dev/null; then rm -f train.code
    eval "$(.venv/bin/python -m trainer.xla_flags tpu)"
    '"$launch"' < /dev/null > /dev/null 2>&1 & echo $! > train.pid; fi'
}

# shellcheck disable=SC2016
follow() {
  local code
  while [[ $(state) == ACTIVE ]]; do
    # Ends with training, or earlier if the connection is lost; then the loop connects again.
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
  # The leader of the process group ends at once, train.py after saving.
  workers 'cd longstripe && if [ -e train.pid ]; then group=$(cat train.pid); kill -- -"$group"
    while kill -0 -- -"$group" 2> /dev/null; do sleep 1; done; rm -f train.pid; echo '"$stopped"' > train.code; fi'
}

run() {
  local code deaths=0
  check_recipe
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
        # Killed by a signal: the slice is being deleted, even if its state does not show it yet, or memory was exhausted.
        deaths=$((deaths + 1))
        [[ $deaths -lt 3 ]] || exit "$code"
        sleep "$poll"
      fi
    elif [[ $(state) == ACTIVE ]]; then
      fail "the installation failed on an active slice: see above"
    fi
    say "restarting from the last checkpoint"
  done
}

case $verb in
  run | create | install | start | follow | stop | delete) "$verb" ;;
  *) fail "unknown verb $verb; run, create, install, start, follow, stop and delete would work" ;;
esac
