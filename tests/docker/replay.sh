#!/usr/bin/env bash
# tests/docker/replay.sh DIR [COMMAND...]    as root, on Debian or Ubuntu with debootstrap
#
# Replays the Dockerfile without a container engine: makes a Debian bookworm root in DIR, runs the
# Dockerfile's own steps in it, in their order, and then COMMAND as the image's user (default: a few
# steps of track tiny). About 10 minutes and 10 GB, most of it pip's; DIR is left there.
#
# Two things stand for others. The base image cannot be had: Debian's python3, with its headers,
# stands for the base image's Python of the same minor version. A root is no container: there is no
# GPU runtime, no limit and no network of its own. pip's variables (PIP_INDEX_URL) pass through.
set -euo pipefail
say() { printf 'replay.sh: %s\n' "$*"; }
die() { say "$1" >&2; exit 1; }

[ $# -ge 1 ] || die "name an empty folder: tests/docker/replay.sh DIR [COMMAND...]"
[ "$(id -u)" = 0 ] || die "needs root: debootstrap and chroot do"
command -v debootstrap >/dev/null || die "debootstrap is missing: apt install debootstrap"
if [ "${REPLAY_UNSHARED-}" != yes ]; then    # what is mounted below goes when this script ends
  REPLAY_UNSHARED=yes exec unshare --mount -- "$0" "$@"
fi

project=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
mkdir -p -- "$1"
root=$(CDPATH='' cd -- "$1" && pwd -P)
[ -z "$(ls -A "$root")" ] || die "$root is not empty"
shift

workdir=/ user=0:0
image_env=(PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
for name in "${!PIP_@}"; do image_env+=("$name=${!name}"); done

inside() {  # as the image's user, in its folder and with its variables alone
  chroot --userspec="$user" "$root" env -i -C "$workdir" "${image_env[@]}" "$@"
}

base() {  # FROM
  [[ $1 =~ ^python:(3\.[0-9]+)\.[0-9]+-slim-bookworm$ ]] || die "FROM $1: not a Debian bookworm"
  debootstrap --variant=minbase --include=python3,python3-venv,python3-dev,ca-certificates \
    bookworm "$root" >"$root.log" 2>&1 || die "debootstrap failed: see $root.log"
  mount --rbind /dev "$root/dev"
  mount -t proc proc "$root/proc"
  cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
  # this machine's network may have a certificate of its own
  cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
  inside python3 -V | grep -q "^Python ${BASH_REMATCH[1]}\." ||
    die "bookworm's Python is not ${BASH_REMATCH[1]}, which the Dockerfile's base has"
}

copy() {  # COPY SOURCE... TARGET, less what .dockerignore names
  local pattern options=(--owner=root:0 --group=root:0)
  [[ $1 != -* ]] || die "COPY $1: not known here"
  while read -r pattern; do
    case $pattern in
      '' | '#'*) ;;
      '!'*) die ".dockerignore: '$pattern': not known here" ;;
      '**/'*) options+=(--no-anchored "--exclude=${pattern#'**/'}") ;;
      *) options+=(--anchored "--exclude=$pattern" "--exclude=./$pattern") ;;
    esac
  done <"$project/.dockerignore"
  tar -C "$project" "${options[@]}" -cf - "${@:1:$#-1}" |
    tar -C "$root$workdir/${!#}" --no-overwrite-dir --numeric-owner -xf -
}

step() {  # one instruction of the Dockerfile
  local began=$SECONDS words
  read -ra words <<<"$2"
  case $1 in
    FROM) base "$2" ;;
    RUN) inside /bin/sh -c "$2" </dev/null ;;
    ENV) image_env+=("${words[@]}") ;;
    WORKDIR) workdir=$2; mkdir -p "$root$2" ;;
    COPY) copy "${words[@]}" ;;
    USER) user=$2 ;;
    VOLUME | CMD) ;;
    *) die "Dockerfile: $1: not known here" ;;
  esac
  say "$((SECONDS - began)) s, $(du -sxm "$root" | cut -f1) MB: $1 $2"
}

text=''
while IFS= read -r line; do
  case $line in '#'* | '') continue ;; esac
  text+=${line%\\}
  if [ "${line%\\}" = "$line" ]; then
    step "${text%% *}" "${text#* }"
    text=''
  fi
done <"$project/Dockerfile"

[ $# -gt 0 ] || set -- ./run.sh --track=tiny --steps=3 --extra_steps=0 --val_tokens=4096
say "as user $user in $workdir: $*"
inside "$@"
