#!/usr/bin/env bash
# Build the images where Docker reaches no network: offline.sh [TARGET...]
#
# This machine (which reaches a package index and Debian's packages, as pip and debootstrap are set up) fetches what the
# build needs; the build then finds it at an index on 127.0.0.1 of the network that it runs in. The Dockerfile is the same,
# and pip compares the same digests. The images that it begins with are stand-ins of the same Debian, Python and compiler
# versions, made by debootstrap and tagged as those that the Dockerfile names, unless images of these names are there. Needs
# root and Docker, or what e2e/cluster/docker.sh needs.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
CACHE=${KVFERRY_CACHE:-$HOME/.cache/kvferry}/images
PYTHON=${PYTHON:-.venv/bin/python}
PORT=${PORT:-8765}
NETNS=kvferry-docker # of the private Docker
BASE=${BASE:-$(sed -n 's/^ARG BASE=//p' images/Dockerfile)}
COMPILER=${COMPILER:-$(sed -n 's/^ARG COMPILER=//p' images/Dockerfile)}
TORCH=${TORCH:-cpu}

say() { echo "images/offline.sh: $*" >&2; }

[ $# -gt 0 ] || set -- operator router runtime
case "$TORCH${TORCH_INDEX:-} $* " in "cpu "*" runtime "*)
  say "TORCH=cpu takes torch from TORCH_INDEX, and the package index has no build of it without CUDA for x86-64;"
  say "accepted: TORCH_INDEX=URL of an index that the build reaches, TORCH=cuda, or TARGETS=\"operator router\""
  exit 1 ;;
esac
if [ -z "${KVFERRY_IN_DOCKER:-}" ]; then
  e2e/cluster/docker.sh up >/dev/null
  KVFERRY_IN_DOCKER=1 exec e2e/cluster/docker.sh in images/offline.sh "$@"
fi
mkdir -p "$CACHE"

within=()
[ -z "${DOCKER_HOST:-}" ] || within=(ip netns exec "$NETNS")

# stand_in IMAGE PACKAGES
stand_in() {
  docker image inspect "$1" >/dev/null 2>&1 && return
  local root
  root=$(mktemp -d "$CACHE/root.XXXXXX")
  say "making a stand-in for $1 with debootstrap"
  debootstrap --variant=minbase --include="$2" bookworm "$root" >"$CACHE/debootstrap.log" 2>&1
  rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale,info}/* "$root"/var/log/*
  tar -C "$root" --numeric-owner -c . | docker import - "$1" >/dev/null
  rm -rf "$root"
}

# Files of the requirements, each project in a folder of its own, as an index has them.
fetch() {
  local file=images/requirements/$1
  say "fetching what $file names"
  "$PYTHON" -m pip download --quiet --disable-pip-version-check --require-hashes --only-binary=:all: --no-deps \
    --dest "$CACHE/wheels" --requirement "$file"
}

index() {
  rm -rf "$CACHE/simple"
  local wheel project
  for wheel in "$CACHE"/wheels/*.whl; do
    project=$(basename "$wheel" | sed 's/-.*//' | tr 'A-Z_.' 'a-z--' | tr -s -)
    mkdir -p "$CACHE/simple/$project"
    ln -f "$wheel" "$CACHE/simple/$project/"
  done
}

stand_in "$BASE" python3,python3-venv,ca-certificates
# The builder of old makes every stage before the one that is asked for.
for file in wheel operator router; do fetch "$file.txt"; done
case " $* " in
  *" runtime "*)
    fetch "runtime-$TORCH.txt"
    stand_in "$COMPILER" python3,g++
    ;;
esac
index
# Not by a function: that would run in a shell of its own, and the trap would end the shell alone.
"${within[@]}" "$PYTHON" -m http.server --bind 127.0.0.1 --directory "$CACHE" "$PORT" >"$CACHE/index.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
for _ in $(seq 50); do
  "${within[@]}" "$PYTHON" -c "import socket; socket.create_connection(('127.0.0.1', $PORT), 1)" 2>/dev/null && break
  sleep 0.1
done
# The builder of old needs no plugin, and runs containers as this Docker does.
export BASE COMPILER TORCH PIP_INDEX_URL=http://127.0.0.1:$PORT/simple TORCH_INDEX=${TORCH_INDEX:-http://127.0.0.1:$PORT/simple}
export OFFLINE=1 DOCKER_BUILDKIT=0 DOCKER_BUILD_ARGS="--network host ${DOCKER_BUILD_ARGS:-}"
images/build.sh "$@"
