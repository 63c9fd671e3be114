#!/usr/bin/env bash
# tests/pretended_gpu/setup.sh [DIR]    DIR defaults to .pretended in the project's folder
#
# Makes DIR, or makes sure of it when it is there: a virtual environment with requirements.txt and
# the CUDA build of torch, and the pretended driver, compiled for it. About 2 minutes and 6 GB the
# first time, seconds after that. Then DIR/run COMMAND... runs a command there, as in
#   DIR/run python -m pytest -m pretended_gpu
# PYTHON chooses the interpreter (3.10 to 3.13), TORCH_VERSION a torch other than the pinned one.
set -euo pipefail
die() { printf 'setup.sh: %s\n' "$*" >&2; exit 1; }

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
root=$(dirname -- "$(dirname -- "$here")")
dir=${1:-$root/.pretended}
mkdir -p -- "$dir"
dir=$(CDPATH='' cd -- "$dir" && pwd -P)
python=$dir/venv/bin/python
command -v gcc >/dev/null || die "gcc is needed (Debian, Ubuntu: sudo apt install gcc)"

# ---- the environment: an unfinished one, or one without CUDA in its torch, is made anew ---------
whole() { "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null; }
if [ -e "$dir/unfinished" ] || ! whole; then
  touch "$dir/unfinished"
  "${PYTHON:-python3}" -m venv --clear "$dir/venv"
fi
touch "$dir/unfinished"
packages=$(cat "$root/requirements.txt")
if [ -n "${TORCH_VERSION-}" ]; then
  packages=$(grep -vE '^(torch|triton)==' <<<"$packages")$'\n'torch==$TORCH_VERSION
fi
# pip's own settings may name a folder of CPU wheels, which pip would prefer: leave them out
PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS='' "$python" -m pip install --quiet \
  --disable-pip-version-check -r <(printf '%s\n' "$packages") </dev/null
whole || die "pip brought a torch without CUDA (is this Linux on x86_64 or aarch64?)"
rm "$dir/unfinished"

# ---- the driver, and the command that puts it in front ------------------------------------------
include=$("$python" -c 'import os, triton
print(os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "include"))')
gcc -std=gnu17 -O1 -shared -fPIC -w -I"$include" -Wl,-soname,libcuda.so.1 \
  -o "$dir/libcuda.so.1" "$here/pretended_gpu.c"
ln -sf libcuda.so.1 "$dir/libnvidia-ml.so.1"
cat >"$dir/run" <<'R'
#!/usr/bin/env bash
dir=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# LD_PRELOAD by name: it could not hold a path with spaces
export LD_LIBRARY_PATH="$dir" LD_PRELOAD="libcuda.so.1" TRITON_LIBCUDA_PATH="$dir"
export PATH="$dir/venv/bin:$PATH"
# compiled code is kept: compilation is most of the time spent here
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$dir/cache/inductor}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$dir/cache/triton}"
exec "$@"
R
chmod +x "$dir/run"
"$dir/run" python -c 'import torch
p = torch.cuda.get_device_properties(0)
assert p.name.startswith("Pretended"), p.name
print(f"{p.name}: {p.major}.{p.minor}, {p.total_memory >> 30} GiB; torch {torch.__version__}")'
