#!/usr/bin/env bash
# Build the images: build.sh [TARGET...]     targets: operator router runtime (default: all)
#
# Environment: REPOSITORY (kvferry), TAG (the version), BASE, COMPILER, TORCH (cpu or cuda), TORCH_INDEX, TORCH_SHA256,
# PIP_INDEX_URL, RELEASE=1 (refuse what could not be made again), OFFLINE=1 (see offline.sh), DOCKER_BUILD_ARGS (more for docker build).
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."

die() { echo "images/build.sh: $*" >&2; exit 1; }

REPOSITORY=${REPOSITORY:-kvferry}
VERSION=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
TAG=${TAG:-$VERSION}
REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 1767225600)}

[ $# -gt 0 ] || set -- operator router runtime
for target; do
  case $target in operator | router | runtime) ;; *) die "no target $target; there are operator, router and runtime" ;; esac
done
case ${TORCH:-cpu} in cpu | cuda) ;; *) die "TORCH=$TORCH; accepts cpu or cuda" ;; esac
if [ -n "${RELEASE:-}" ]; then
  case ${BASE:-} in *@sha256:*) ;; *) die "a release names its base image by digest: BASE=NAME:TAG@sha256:..." ;; esac
  case " $* / ${COMPILER:-}" in
    *" runtime "*/*@sha256:*) ;;
    *" runtime "*) die "a release names the image that compiles its operators by digest: COMPILER=NAME:TAG@sha256:..." ;;
  esac
  [ -z "$(git status --porcelain)" ] || die "a release is built from a clean checkout"
  [ "${TORCH:-cpu}" = cuda ] || [ -n "${TORCH_SHA256:-}" ] || die "a release of TORCH=cpu names its file: TORCH_SHA256=..."
fi

arguments=(--build-arg "VERSION=$VERSION" --build-arg "REVISION=$REVISION" --build-arg "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH")
# One base for all stages and targets, though the tag moves meanwhile; and said, so that it can be had again.
# pinned NAME: the image that the argument NAME (or the Dockerfile) names, with its digest where it has one.
pinned() {
  local image=${!1:-$(sed -n "s/^ARG $1=//p" images/Dockerfile)} digest
  case $image in *@sha256:*) echo "$image" && return ;; esac
  { [ -z "${OFFLINE:-}" ] && docker pull --quiet "$image" >/dev/null 2>&1; } || docker image inspect "$image" >/dev/null 2>&1 ||
    die "$1=$image cannot be pulled and is not here; accepted: an image of Debian 12 with $2, by tag or digest"
  digest=$(docker image inspect --format '{{range .RepoDigests}}{{.}} {{end}}' "$image" | grep -o 'sha256:[0-9a-f]*' | head -1) || true
  if [ -n "$digest" ]; then
    echo "images/build.sh: on $1=$image@$digest" >&2
  else
    echo "images/build.sh: on $1=$image of this machine alone, which has no digest" >&2
  fi
  echo "$image${digest:+@$digest}"
}
BASE=$(pinned BASE "Python 3.11")
case " $* " in *" runtime "*) COMPILER=$(pinned COMPILER "Python 3 and g++") ;; esac
BASE_DIGEST=
case $BASE in *@*) BASE_DIGEST=${BASE#*@} ;; esac
arguments+=(--build-arg "BASE_NAME=${BASE%@*}" --build-arg "BASE_DIGEST=$BASE_DIGEST")
for name in BASE COMPILER TORCH TORCH_INDEX TORCH_SHA256 PIP_INDEX_URL; do
  [ -z "${!name:-}" ] || arguments+=(--build-arg "$name=${!name}")
done
# shellcheck disable=SC2206  # several arguments in one variable
arguments+=(${DOCKER_BUILD_ARGS:-})

for target; do
  image=$REPOSITORY/$target:$TAG
  echo "images/build.sh: building $image" >&2
  docker build --file images/Dockerfile --target "$target" --tag "$image" "${arguments[@]}" .
  docker image inspect --format "$image {{.Id}} {{.Size}} bytes" "$image"
done
