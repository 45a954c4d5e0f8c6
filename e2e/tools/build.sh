#!/usr/bin/env bash
# Build the programs that tests on Kubernetes need, from the Go modules in modules/, where no registry gives them.
#
#   e2e/tools/build.sh GROUP...         builds what is absent; the folder of the programs is the last line of stdout
#   e2e/tools/build.sh --find GROUP...  builds nothing; exit 3 where something is absent
#
#   apiserver   kube-apiserver, etcd, kubectl
#   helm        helm3, helm4
#   kind        kind, and what a node image is made of (see ../cluster)
#
# Programs lie in ${KVFERRY_CACHE:-~/.cache/kvferry}/tools/<hash of this folder>/bin and appear there whole, so that any
# number of callers may run at once. Needs Go only where something is absent. Exit 3: something is missing on this
# machine, and the last line of stderr says what and how to get it.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"

LOCK_WAIT_S=3600 # another caller's build of everything on a slow machine
GO_WANTED=1.26.6 # the newest that a module asks for

say() { echo "tools: $*" >&2; }
die() { say "$2"; exit "$1"; }

cache=${KVFERRY_CACHE:-$HOME/.cache/kvferry}/tools
hash=$(find . -type f ! -name '*.md' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16)
home=$cache/$hash
bin=$home/bin

# Programs of each group, and the recipe (a function below) that makes each.
programs_of() {
  case $1 in
    apiserver) echo kube-apiserver kubectl etcd ;;
    helm) echo helm3 helm4 ;;
    kind) echo kube-apiserver kubectl kubeadm etcd kind containerd ctr containerd-shim-runc-v2 crictl local-path-provisioner coredns pause ;;
    *) die 2 "no group '$1'; the groups are: apiserver helm kind" ;;
  esac
}

# Version of module $2 in the module folder $1, as its go.mod pins it: v1.2.3.
pinned() { awk -v module="$2" '$1 == module { print $2; exit } $1 == "require" && $2 == module { print $3; exit }' "modules/$1/go.mod"; }

# compile FOLDER PACKAGE OUTPUT [go build's options]: an executable without C code that depends on no path of this machine.
compile() {
  local folder=$1 package=$2 output=$3
  shift 3
  (cd "modules/$folder" && CGO_ENABLED=0 GOFLAGS="-trimpath -buildvcs=false -mod=readonly" GOWORK=off \
    go build "$@" -o "$home/new/$output" "$package")
  mv "$home/new/$output" "$bin/$output"
}

build_kube() {
  local version major minor flags="-s -w" setting
  version=$(pinned kubernetes k8s.io/kubernetes)
  IFS=. read -r major minor _ <<<"${version#v}"
  for setting in gitVersion="$version" gitMajor="$major" gitMinor="$minor" gitCommit=none gitTreeState=clean; do
    flags+=" -X k8s.io/component-base/version.$setting" # without it nodes call themselves v0.0.0-master
  done
  compile kubernetes . kube -p "${KVFERRY_BUILD_JOBS:-2}" -ldflags "$flags -X k8s.io/client-go/pkg/version.gitVersion=$version"
}

build_helm3() {
  local version client major minor flags="-s -w" package
  version=$(pinned helm3 helm.sh/helm/v3)
  client=$(pinned helm3 k8s.io/client-go) # v0.MINOR: Helm takes "its" Kubernetes version from here
  IFS=. read -r major minor _ <<<"${client#v}"
  for package in pkg/lint/rules pkg/chartutil; do
    flags+=" -X helm.sh/helm/v3/$package.k8sVersionMajor=$((major + 1)) -X helm.sh/helm/v3/$package.k8sVersionMinor=$minor"
  done
  compile helm3 helm.sh/helm/v3/cmd/helm helm3 -ldflags "$flags -X helm.sh/helm/v3/internal/version.version=$version"
}

build_helm4() {
  compile helm4 helm.sh/helm/v4/cmd/helm helm4 -ldflags "-s -w -X helm.sh/helm/v4/internal/version.version=$(pinned helm4 helm.sh/helm/v4)"
}

build_containerd() { # $1: containerd, ctr or the shim
  local module=github.com/containerd/containerd/v2
  compile containerd "$module/cmd/$1" "$1" -tags "no_aufs no_zfs no_btrfs no_devmapper" \
    -ldflags "-s -w -X $module/version.Version=$(pinned containerd $module)"
}

build_crictl() {
  local module=sigs.k8s.io/cri-tools
  compile crictl $module/cmd/crictl crictl -ldflags "-s -w -X $module/pkg/version.Version=$(pinned crictl $module)"
}

# Make one program. Programs of Kubernetes are one executable, called by its names.
make_program() {
  say "building $1"
  case $1 in
    kube-apiserver | kubectl | kubeadm)
      [ -x "$bin/kube" ] || build_kube
      ln -sfn kube "$home/new/$1" && mv -T "$home/new/$1" "$bin/$1"
      ;;
    helm3) build_helm3 ;;
    helm4) build_helm4 ;;
    containerd | ctr | containerd-shim-runc-v2) build_containerd "$1" ;;
    crictl) build_crictl ;;
    kind) compile kind sigs.k8s.io/kind kind -ldflags "-s -w" ;;
    local-path-provisioner) compile local-path github.com/rancher/local-path-provisioner "$1" -ldflags "-s -w" ;;
    etcd | coredns | pause) compile "$1" . "$1" -ldflags "-s -w" ;;
  esac
}

need_go() {
  local version
  command -v go >/dev/null || die 3 "Go $GO_WANTED or newer is needed to build $*; get it from https://go.dev/dl"
  version=$(go env GOVERSION) # goX.Y.Z; an older one may fetch the wanted toolchain by itself, and says so where it cannot
  version=${version#go}
  if [ "$(printf '%s\n' "$GO_WANTED" "${version%%[- ]*}" | sort -V | head -1)" != "$GO_WANTED" ] && [ "$(go env GOTOOLCHAIN)" = local ]; then
    die 3 "Go $GO_WANTED or newer is needed to build $*, this one is $version; get it from https://go.dev/dl"
  fi
}

absent() { # groups share programs: each is told once
  local program
  for program in "$@"; do [ -x "$bin/$program" ] || echo "$program"; done | awk '!seen[$0]++'
}

# Folders of other versions that nobody has used for two weeks.
forget_old() {
  find "$cache" -mindepth 1 -maxdepth 1 -type d ! -name "$hash" -mtime +14 -exec rm -rf {} +
}

only_find=
if [ "${1:-}" = --find ]; then
  only_find=yes
  shift
fi
[ $# -gt 0 ] || die 2 "usage: build.sh [--find] GROUP... (apiserver, helm, kind)"
wanted=()
for group in "$@"; do
  members=$(programs_of "$group")
  read -ra names <<<"$members"
  wanted+=("${names[@]}")
done

mkdir -p "$bin"
touch "$home"
mapfile -t todo < <(absent "${wanted[@]}")
if [ ${#todo[@]} -gt 0 ]; then
  [ -z "$only_find" ] || die 3 "not built: ${todo[*]}; e2e/tools/build.sh $* builds them"
  need_go "${todo[*]}"
  command -v flock >/dev/null || die 3 "flock is needed to build ${todo[*]} (package util-linux)"
  exec 9>"$home/lock"
  flock -n 9 || say "another build runs in $home; waiting for it"
  flock -w "$LOCK_WAIT_S" 9 || die 1 "waited ${LOCK_WAIT_S} s for the build that holds $home/lock (see: fuser -v $home/lock)"
  mkdir -p "$home/new"
  started=$SECONDS
  for program in "${todo[@]}"; do
    [ -x "$bin/$program" ] || make_program "$program" # it may have come while we waited
  done
  forget_old
  say "built ${todo[*]} in $((SECONDS - started)) s"
fi
echo "$bin"
