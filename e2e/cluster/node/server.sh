#!/usr/bin/env bash
# The archive that `kind build node-image --type file` takes: kubeadm, kubelet, kubectl, a version, and image archives. The
# archives hold every image that a node needs, so that kind has nothing to fetch. Names and tags are asked of kubeadm and of
# kind's own module: none is written here.
#
#   server.sh BIN WORK OUT.tgz     WORK/root is what base.sh made
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "$(readlink -f "$0")")/../lib.sh"
BIN=$1 WORK=$2 OUT=$3
ROOT=$WORK/root IMAGES=$WORK/images SERVER=$WORK/archive/kubernetes
KIND=$(cd "$E2E_CLUSTER/../tools/modules/kind" && GOFLAGS=-mod=readonly go list -m -f '{{.Dir}}' sigs.k8s.io/kind)
VERSION=$("$BIN/kubectl" version --client -o json | python3 -c 'import json, sys; print(json.load(sys.stdin)["clientVersion"]["gitVersion"])')
WANTED=$("$BIN/kubeadm" config images list --kubernetes-version "$VERSION")

wanted() { grep "/$1:" <<<"$WANTED"; }                                                    # an image that kubeadm names
default() { grep -ho '= "[a-z./-]*/'"$1"':[^"]*' "$KIND"/pkg/build/nodeimage/const_*.go | cut -c4-; } # one that kind names
archive() { python3 "$E2E_CLUSTER/image_archive.py" "$@"; }

# copy_program PATH: a program of the node's root with its libraries, into the image of Kubernetes' programs.
copy_program() {
  local source library
  source=$(readlink -f "$ROOT$1")
  [ -e "$source" ] || source=$ROOT$1 # an absolute link, which leads out of the root
  cp "$source" "$IMAGES/kube/usr/sbin/$(basename "$1")"
  chroot "$ROOT" ldd "$1" | grep -o '/[^ ]*\.so[^ ]*' | while read -r library; do
    mkdir -p "$IMAGES/kube$(dirname "$library")"
    cp -Lu "$ROOT$library" "$IMAGES/kube$library"
  done
}

# One layer for all programs of Kubernetes, etcd, a shell, and what kube-proxy and the pod network call.
kube_layer() {
  local kube=$IMAGES/kube name
  mkdir -p "$kube"/{tmp,etc,bin,sbin,usr/sbin,usr/local/bin,usr/lib}
  chmod 1777 "$kube/tmp"
  cp "$BIN"/{kube,etcd} "$kube/usr/local/bin/"
  for name in kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubectl; do ln -s kube "$kube/usr/local/bin/$name"; done
  cp "$ROOT/bin/busybox" "$kube/bin/"
  for name in $("$ROOT/bin/busybox" --list); do
    case $name in busybox | ip) ;; *) ln -s busybox "$kube/bin/$name" ;; esac
  done
  for name in /usr/sbin/xtables-nft-multi /usr/sbin/conntrack /usr/sbin/nft /bin/ip /usr/sbin/ethtool; do copy_program "$name"; done
  for name in iptables ip6tables; do
    ln -s xtables-nft-multi "$kube/usr/sbin/$name"
    ln -s xtables-nft-multi "$kube/usr/sbin/$name-save"
    ln -s xtables-nft-multi "$kube/usr/sbin/$name-restore"
  done
  (cd "$ROOT" && find usr/lib -type d -name xtables -exec cp -r --parents {} "$kube" \;)
  for name in protocols services; do [ ! -e "$ROOT/etc/$name" ] || cp "$ROOT/etc/$name" "$kube/etc/"; done
  printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n' >"$kube/etc/passwd"
  printf 'root:x:0:\nnogroup:x:65534:\n' >"$kube/etc/group"
}

# kind takes exactly these four names; what lies in them is for us to say.
image_archives() {
  local bin=$SERVER/server/bin name tags=()
  mkdir -p "$bin" "$IMAGES"/{pause,coredns,extra/usr/local/bin}
  for name in kube-apiserver kube-controller-manager kube-scheduler kube-proxy etcd; do tags+=(--tag "$(wanted "$name")"); done
  archive "$bin/kube-apiserver.tar" "${tags[@]}" "$IMAGES/kube"
  cp "$BIN/pause" "$IMAGES/pause/pause"
  archive "$bin/kube-controller-manager.tar" --entrypoint /pause "$IMAGES/pause" \
    --tag "$(sed -n 's/.*sandbox_image = "\(.*\)"/\1/p' "$ROOT/etc/containerd/config.toml")"
  cp "$BIN/coredns" "$IMAGES/coredns/coredns"
  archive "$bin/kube-scheduler.tar" --entrypoint /coredns --tag "$(wanted coredns)" "$IMAGES/coredns"
  cp "$BIN/local-path-provisioner" "$IMAGES/extra/usr/local/bin/"
  install -m 0755 "$E2E_CLUSTER/node/podnet.sh" "$IMAGES/extra/usr/local/bin/kindnetd"
  tags=()
  for name in kindnetd local-path-provisioner local-path-helper; do tags+=(--tag "$(default "$name")"); done
  archive "$bin/kube-proxy.tar" --entrypoint /usr/local/bin/kindnetd "${tags[@]}" "$IMAGES/kube" "$IMAGES/extra"
}

rm -rf "$IMAGES" "$WORK/archive"
kube_layer
image_archives
printf %s "$VERSION" >"$SERVER/version"
for name in kubeadm kubelet kubectl; do
  # the program itself is in the base image
  printf '#!/bin/sh\nexec /usr/local/bin/kube %s "$@"\n' "$name" >"$SERVER/server/bin/$name"
  chmod 0755 "$SERVER/server/bin/$name"
done
tar -C "$WORK/archive" -cf - kubernetes | gzip -1 >"$OUT"
