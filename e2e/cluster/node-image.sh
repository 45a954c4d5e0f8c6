#!/usr/bin/env bash
# The image of a node, with the Docker of docker.sh: prints its name, and makes it where that is wanted.
#
#   node-image.sh BIN [IMAGE]    BIN: programs of ../tools/build.sh
#
# IMAGE names an image that Docker has or can pull. `published` is the one that kind takes by itself. `build` is made here from Go
# modules and Debian packages, where no registry can be reached; without IMAGE that is what a private Docker gets.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$(readlink -f "$0")")/lib.sh"
BIN=$1 IMAGE=${2:-}
NAME=kvferry/kind-node
PACKAGES=(debootstrap)

build() {
  local image work lacking started=$SECONDS
  image=$NAME:$(cat <(hash_of "$E2E_CLUSTER/node" "$E2E_CLUSTER/image_archive.py") <(basename "$(dirname "$BIN")") | sha256sum | cut -c1-12)
  if ! docker image inspect "$image" >/dev/null 2>&1; then
    [ "$(id -u)" = 0 ] || die 3 "only root can build a node image (debootstrap); name one that can be pulled: IMAGE=published"
    lacking=$(missing debootstrap chroot)
    [ -z "$lacking" ] || install_packages "$lacking" "${PACKAGES[@]}"
    command -v go >/dev/null || die 3 "Go is needed to build a node image (https://go.dev/dl)"
    work=$CACHE/node-image
    mkdir -p "$work"
    exec 9>"$work/lock"
    flock -w 1800 9 || die 1 "waited 1800 s for another build of a node image (see: fuser -v $work/lock)"
    if ! docker image inspect "$image" >/dev/null 2>&1; then
      say "building $image (three to four minutes)"
      "$E2E_CLUSTER/node/base.sh" "$BIN" "$work" "$image-base"
      "$E2E_CLUSTER/node/server.sh" "$BIN" "$work" "$work/server.tgz"
      timeout 900 "$BIN/kind" build node-image --type file --base-image "$image-base" --image "$image" "$work/server.tgz" >"$work/kind.log" 2>&1 ||
        die 1 "kind could not build the node image; see $work/kind.log"
      forget_old "$image"
      rm -rf "${work:?}"/{root,images,archive,server.tgz}
      say "built $image in $((SECONDS - started)) s"
    fi
  fi
  echo "$image"
}

published() {
  local source
  source=$(cd "$E2E_CLUSTER/../tools/modules/kind" && GOFLAGS=-mod=readonly go list -m -f '{{.Dir}}' sigs.k8s.io/kind)
  sed -n 's/^const Image = "\(.*\)"/\1/p' "$source/pkg/apis/config/defaults/image.go" | grep . || die 1 "kind names no image of its own; say IMAGE=NAME"
}

forget_old() {
  docker image ls --format '{{.Repository}}:{{.Tag}}' "$NAME" | grep -v "^$1" | xargs -r docker image rm >/dev/null 2>&1 || true
}

if [ -z "$IMAGE" ]; then
  case $(docker info --format '{{.DefaultRuntime}} {{.DockerRootDir}}') in *"$CACHE/docker/"*) IMAGE=build ;; *) IMAGE=published ;; esac
fi
case $IMAGE in
  build) build ;;
  published) published ;;
  *) echo "$IMAGE" ;;
esac
