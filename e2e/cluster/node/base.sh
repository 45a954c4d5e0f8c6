#!/usr/bin/env bash
# The root file system of a node, as a Docker image: Debian 12, whose systemd 252 still starts on cgroup v1, kind's own files
# out of its Go module, and what a plain machine needs.
#
#   base.sh BIN WORK IMAGE     BIN: programs of ../../tools/build.sh; WORK: scratch, $WORK/root stays for server.sh
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "$(readlink -f "$0")")/../lib.sh"
BIN=$1 WORK=$2 IMAGE=$3
ROOT=$WORK/root
PACKAGES=systemd,conntrack,iptables,nftables,iproute2,ethtool,util-linux,mount,kmod,libseccomp2,pigz,ca-certificates,jq,procps,curl,runc,containernetworking-plugins,socat,busybox-static

debian() {
  local archive
  archive=$CACHE/debian/bookworm-$(sha256sum <<<"$PACKAGES" | cut -c1-12).tar
  if [ ! -e "$archive" ]; then
    mkdir -p "$CACHE/debian/packages"
    say "installing Debian 12 into a folder (debootstrap, about two minutes)"
    rm -rf "$WORK/debian"
    timeout 1200 debootstrap --variant=minbase --cache-dir="$CACHE/debian/packages" --include="$PACKAGES" \
      bookworm "$WORK/debian" ${KVFERRY_DEBIAN_MIRROR:+"$KVFERRY_DEBIAN_MIRROR"} >"$WORK/debootstrap.log" 2>&1 ||
      die 1 "debootstrap failed; see $WORK/debootstrap.log (another mirror: KVFERRY_DEBIAN_MIRROR=URL)"
    (cd "$WORK/debian" && rm -rf var/cache/apt/* var/lib/apt/lists/* usr/share/doc/* usr/share/man/* usr/share/locale/* usr/share/info/*)
    tar -C "$WORK/debian" -cf "$archive.new" . && mv "$archive.new" "$archive"
    rm -rf "$WORK/debian" "$CACHE/debian/packages"
  fi
  rm -rf "$ROOT"
  mkdir -p "$ROOT"
  tar -C "$ROOT" -xf "$archive"
}

kinds_files() {
  local files file mode
  files=$(cd "$E2E_CLUSTER/../tools/modules/kind" && GOFLAGS=-mod=readonly go list -m -f '{{.Dir}}' sigs.k8s.io/kind)/images/base/files
  while read -r file; do
    case $file in ./usr/local/bin/* | ./kind/bin/*) mode=0755 ;; *) mode=0644 ;; esac
    install -D -m "$mode" "$files/$file" "$ROOT/$file"
  done < <(cd "$files" && find . -type f)
}

programs() {
  install -m 0755 "$BIN"/{containerd,containerd-shim-runc-v2,ctr,crictl,kube} "$ROOT/usr/local/bin/"
  mkdir -p "$ROOT"/{opt/cni/bin,etc/kubernetes/manifests,kind/manifests}
  cp "$ROOT"/usr/lib/cni/{host-local,loopback,ptp,portmap} "$ROOT/opt/cni/bin/"
  "$BIN/ctr" oci spec | python3 -c '
import json, sys
spec = json.load(sys.stdin)
spec["process"].pop("rlimits", None)
spec.setdefault("hooks", {}).setdefault("createContainer", []).append({"path": "/kind/bin/mount-product-files.sh"})
json.dump(spec, sys.stdout)' >"$ROOT/etc/containerd/cri-base.json"
}

# Only the units that a node needs: others would change the whole machine (binfmt, sysctl) or wait for hardware.
units() {
  local unit
  rm -f "$ROOT"/lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service \
    "$ROOT"/lib/systemd/system/{multi-user,local-fs,basic}.target.wants/* "$ROOT"/etc/systemd/system/*.wants/* \
    "$ROOT"/lib/systemd/system/sockets.target.wants/*{udev,initctl}* "$ROOT"/usr/lib/sysctl.d/*.conf "$ROOT"/lib/sysctl.d/*.conf
  echo ReadKMsg=no >>"$ROOT/etc/systemd/journald.conf"
  for unit in kubelet containerd undo-mount-hacks; do
    # systemctl works on a folder, and warns of what only a running system has
    chroot "$ROOT" systemctl enable "$unit.service" 2>/dev/null
  done
  chroot "$ROOT" systemctl mask systemd-binfmt.service 2>/dev/null
}

# No CAP_SYS_RESOURCE, cgroup v1, and settings of the whole machine to be left alone.
plain_machine() {
  sed -i 's/restrict_oom_score_adj = false/restrict_oom_score_adj = true/' "$ROOT/etc/containerd/config.toml"
  install -D -m 0644 "$E2E_CLUSTER/node/kubelet.yaml" "$ROOT/etc/kubernetes/kubelet.conf.d/10-machine.conf"
  sed -i 's|^KUBELET_EXTRA_ARGS=|&--config-dir=/etc/kubernetes/kubelet.conf.d |' "$ROOT/etc/default/kubelet"
  rm -f "$ROOT/sbin/init"
  install -m 0755 "$E2E_CLUSTER/node/init.sh" "$ROOT/sbin/init"
}

debian
kinds_files
programs
units
plain_machine
tar -C "$ROOT" --numeric-owner -c . | docker import - "$IMAGE-root" >/dev/null
# `docker import` cannot set the signal that systemd ends on. The builder of old needs no plugin and no registry.
DOCKER_BUILDKIT=0 docker build --quiet --tag "$IMAGE" - >/dev/null 2>"$WORK/build.log" <<D || die 1 "docker could not build; see $WORK/build.log"
FROM $IMAGE-root
ENV container=docker
STOPSIGNAL SIGRTMIN+3
ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]
D
