#!/usr/bin/env bash
# ./run.sh                       set up on first use, then train: track fineweb if there are a CUDA
#                                device and FineWeb shards, else track tiny
# ./run.sh --seed=1 --name=Mine  every argument goes to train_gpt.py; ./run.sh --help lists them
# ./run.sh --runs=10 --name=Mine a record: runs of seeds 0 to 9, judged and compared; goes on
#                                where it was (records/run_set.py says more)
# ./run.sh --checkpoint_every=30m --resume=auto    a run that lasts and goes on where it was
#                                (tools/keep.py says more)
# ./run.sh --nproc_per_node=2    two processes, through torchrun
# ./run.sh test [...]            the tests; arguments go to pytest
# ./run.sh WORD [...]            runs tools/WORD.py; each of them has --help
#
# The first use makes .venv beside this file from requirements.txt, with Python 3.10 to 3.13
# (python3 if it fits, else the newest found; PYTHON=/path/to/python chooses). Where pip brings the
# CUDA build of torch, it downloads several GB. Later uses skip it until requirements.txt changes.
#
# What a run costs
#   tiny     about 2 minutes of timed training on 2 CPU cores; the data are in data/tiny
#   fineweb  656.7M tokens, once, on one CUDA device; data/cached_fineweb10B.py fetches the shards
set -euo pipefail

say() { printf 'run.sh: %s\n' "$*"; }
die() { say "$1" >&2; exit "${2:-1}"; }

# ---- where the project is: beside this file, also when a link led here --------------------------
self=${BASH_SOURCE[0]}
while [ -L "$self" ]; do
  target=$(readlink -- "$self")
  case $target in /*) self=$target ;; *) self=$(dirname -- "$self")/$target ;; esac
done
root=$(CDPATH='' cd -- "$(dirname -- "$self")" && pwd -P)
venv=$root/.venv
python=$venv/bin/python
if [[ $venv = *[[:space:]]* ]]; then
  # torch.compile's link command breaks at a space in torch's path: go through a link without one
  links=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/single_gpu_speedrun
  link=$links/$(cksum <<<"$venv" | tr ' ' -)
  if [[ $link != *[[:space:]]* ]] && mkdir -p "$links" && ln -sfn "$venv" "$link"; then
    python=$link/bin/python
  fi 2>/dev/null
fi

# ---- what was asked: a wrong command ends here, before anything is installed --------------------
mode=train
case ${1-} in
  -*) ;;
  test) mode="test"; shift ;;
  *) if [ $# -gt 0 ]; then
    tools=''
    for file in "$root"/tools/[a-z]*.py; do
      [ ! -f "$file" ] || tools+=" $(basename -- "$file" .py)"
    done
    [[ -n $1 && " $tools " = *" $1 "* ]] ||
      die "unknown word '$1': './run.sh test' runs the tests${tools:+, other words are$tools}; \
to train, give only settings (--name=value), or nothing" 2
    mode="tool" tool=$root/tools/$1.py; shift
  fi ;;
esac

processes=1 track='' data_dir='' device=auto program=$root/train_gpt.py
settings=()
if [ "$mode" = train ]; then
  while [ $# -gt 0 ]; do
    case $1 in
      --nproc_per_node=* | --nproc-per-node=*) processes=${1#*=} ;;
      --nproc_per_node | --nproc-per-node) processes=${2-}; [ $# -lt 2 ] || shift ;;
      -h | --help) mode=help ;;
      --runs=*) program=$root/records/run_set.py; settings+=("$1") ;;
      --checkpoint[_-]every=* | --resume=* | --resume[_-]anyway*)
        [ "$program" != "$root/train_gpt.py" ] || program=$root/tools/keep.py
        settings+=("$1") ;;
      --track=*) track=${1#*=}; settings+=("$1") ;;
      --data_dir=*) data_dir=${1#*=}; settings+=("$1") ;;
      --device=*) device=${1#*=}; settings+=("$1") ;;
      *) settings+=("$1") ;;
    esac
    shift
  done
  [[ $processes =~ ^[1-9][0-9]{0,3}$ ]] ||
    die "--nproc_per_node=$processes: give a whole number of processes, 1 or more" 2
  [ "$processes" = 1 ] || [ "$program" != "$root/records/run_set.py" ] ||
    die "--runs with --nproc_per_node=$processes: a set is made of runs of one process each" 2
fi

# ---- .venv, from requirements.txt ---------------------------------------------------------------
# .venv/stamp is written last: a set-up that was interrupted has none, and is begun again.
state() {  # of Python $1, if it runs: its version and the sum of requirements.txt, as in the stamp
  "$1" - "$root/requirements.txt" 2>/dev/null <<'P'
import hashlib, sys
print("%d.%d" % sys.version_info[:2], hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())
P
}

look() {  # sets found: ready; old (requirements.txt has changed); none (none that can stay)
  local now stamp
  found=none
  [ -f "$venv/stamp" ] && now=$(state "$python") || return 0
  stamp=$(cat "$venv/stamp")
  [ "${now%% *}" = "${stamp%% *}" ] || return 0           # the Python under .venv was exchanged
  [ -z "${PYTHON-}" ] || [ "$(state "$PYTHON")" = "$now" ] || return 0   # another one is asked for
  found=ready
  [ "$now" = "$stamp" ] || found=old
}

find_python() {  # prints the first Python that runs, has the right version and can make a .venv
  local candidate version bare=''
  local candidates=(python3 python3.13 python3.12 python3.11 python3.10)
  [ -z "${PYTHON-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    # run it: a version manager's python3.12 can be there with no Python behind it
    version=$("$candidate" -c 'import sys; v = sys.version_info[:2]
print("%d.%d" % v if (3, 10) <= v <= (3, 13) else "")' 2>/dev/null </dev/null) || continue
    [ -n "$version" ] || continue
    if "$candidate" -c 'import ensurepip, venv' 2>/dev/null </dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
    bare=${bare:-$version}
  done
  [ -z "$bare" ] || die "Python $bare has no venv module: install it (Debian, Ubuntu: \
sudo apt install python$bare-venv) and run this again"
  [ -z "${PYTHON-}" ] || die "PYTHON=$PYTHON is not a Python 3.10 to 3.13 that runs"
  die "no Python 3.10 to 3.13 found: install one (Debian, Ubuntu: sudo apt install python3 \
python3-venv), or name one: PYTHON=/path/to/python ./run.sh"
}

set_up() {
  local base code=0 quiet=''
  [ -t 2 ] || quiet=--quiet
  if [ $found = old ]; then
    say "requirements.txt has changed: bringing .venv up to it"
    mv "$venv/stamp" "$venv/stamp.old"
  else
    base=$(find_python)
    say "making .venv with $("$base" -V) and installing requirements.txt into it: takes minutes"
    rm -f "$venv/stamp"
    "$base" -m venv --clear "$venv"
  fi
  "$python" -m pip install ${quiet:+"$quiet"} --disable-pip-version-check \
    -r "$root/requirements.txt" </dev/null || code=$?
  # a refusal (1) left the packages as they were, so an older .venv is not lost for it
  [ $code != 1 ] || [ $found != old ] || mv "$venv/stamp.old" "$venv/stamp"
  [ $code = 0 ] ||
    die "pip could not install requirements.txt: mend what it names above and run this again"
  state "$python" >"$venv/stamp.new"
  mv "$venv/stamp.new" "$venv/stamp"
}

look
if [ "$mode" = help ]; then
  sed -n '2,/^set -/s/^# \{0,1\}//p' "$root/run.sh"
  printf '\n'
  [ $found = ready ] || { echo "With .venv set up, train_gpt.py lists its settings here."; exit; }
  exec "$python" "$root/train_gpt.py" --help ${settings[@]+"${settings[@]}"}
fi
if [ $found != ready ]; then
  # one set-up at a time, where flock is there: whoever waited may find it done
  exec 9<"$root/requirements.txt"
  { command -v flock >/dev/null && flock 9; } 2>/dev/null || true
  look
  if [ $found != ready ]; then set_up >&2; fi
  exec 9<&-
fi

if [ "$mode" = test ]; then
  cd -- "$root"
  exec "$python" -m pytest "$@"
fi

if [ "$mode" = tool ]; then exec "$python" "$tool" "$@"; fi

# ---- the track ----------------------------------------------------------------------------------
there() { [ -e "$1" ]; }  # the first of the files that a pattern gave

if [ -z "$track" ]; then
  cuda="--device=$device"
  [ "$device" = cpu ] || cuda=$("$python" -c '
try:
    import torch
    print("yes" if torch.cuda.is_available() else "no CUDA device" if torch.version.cuda
          else "no CUDA device (torch here is a CPU build)")
except (ImportError, OSError):
    print("no CUDA device (torch does not import)")' </dev/null)
  shards=${data_dir:-$root/data/fineweb10B}
  track=tiny
  if [ "$cuda" != yes ]; then
    why=$cuda
  elif there "$shards"/fineweb_train_*.bin && there "$shards"/fineweb_val_*.bin; then
    track=fineweb
    why="a CUDA device, and shards in $shards"
  else
    why="a CUDA device, but no FineWeb shards in $shards: \
.venv/bin/python data/cached_fineweb10B.py${data_dir:+ --dest=$data_dir} fetches them (2.0 GB)"
  fi
  settings=("--track=$track" ${settings[@]+"${settings[@]}"})
else
  why="--track was given"
fi
say "track $track: $why"

# ---- train: by exec, so that signals reach Python and its exit code is this one's ---------------
launcher=()
[ "$processes" = 1 ] ||
  launcher=(-m torch.distributed.run --standalone "--nproc_per_node=$processes")
exec "$python" ${launcher[@]+"${launcher[@]}"} \
  "$program" ${settings[@]+"${settings[@]}"}
