#!/usr/bin/env bash
# The Docker that clusters run on: this machine's own where one answers, else a private one.
#
#   docker.sh up           start the private one if none answers; prints "own" or "private"
#   docker.sh env          print `export DOCKER_HOST=...` for a shell (nothing for this machine's own)
#   docker.sh in CMD...    run CMD with that Docker, which stays up meanwhile
#   docker.sh down [--if-idle]   remove the private one's containers and stop it; --if-idle: only if nobody uses it
#
# The private Docker works on a plain machine: as root, without systemd, on cgroup v1 or v2, without CAP_SYS_RESOURCE. It
# runs in a network namespace and a mount namespace of its own, so that routes, iptables and sysctls of the machine stay
# as they are. Its images stay in $KVFERRY_CACHE between runs.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$(readlink -f "$0")")/lib.sh"

NAME=$PRIVATE_DOCKER
NETNS=$NAME
RUN=/run/$NAME # sockets, pids, logs: short paths, gone with a reboot
STORE=$CACHE/docker
SOCKET=unix://$RUN/docker.sock
PARTS=(dockerd containerd) # in the order in which they are stopped
PACKAGES=(docker.io containerd runc iptables iproute2 util-linux)

own_docker() {
  [ "${DOCKER_HOST:-}" != "$SOCKET" ] && timeout 20 docker info >/dev/null 2>&1
}

private_docker() { DOCKER_HOST=$SOCKET timeout 20 docker version >/dev/null 2>&1; }

# The pid of dockerd or containerd, if it runs: a pid alone could be anyone's.
pid_of() {
  local pid
  pid=$(cat "$RUN/$1.pid" 2>/dev/null) || return 1
  { tr '\0' ' ' <"/proc/$pid/cmdline"; } 2>/dev/null | grep -q "$RUN/$1" && echo "$pid"
}

check_machine() {
  local lacking
  [ "$(uname -s)" = Linux ] || die 3 "no Docker answers here; install it: https://docs.docker.com/get-docker"
  [ "$(id -u)" = 0 ] || die 3 "no Docker answers, and only root can start a private one. Install Docker (https://docs.docker.com/engine/install), start it, and let this user use it; or become root"
  lacking=$(missing docker dockerd containerd runc iptables ip nsenter unshare flock)
  [ -z "$lacking" ] || install_packages "$lacking" "${PACKAGES[@]}"
}

# A root that holds every capability needs no help; another cannot start containers that ask for more than it has.
write_config() {
  local runtimes='{}' default=runc
  if [ "$(awk '/^CapBnd/ {print $2}' /proc/self/status)" != "$(printf '%016x' $(((1 << ($(cat /proc/sys/kernel/cap_last_cap) + 1)) - 1)))" ]; then
    runtimes="{\"within\":{\"path\":\"$E2E_CLUSTER/runc_within.py\"}}"
    default=within
  fi
  cat >"$RUN/containerd.toml" <<J
version = 2
root = "$STORE/containerd"
state = "$RUN/containerd"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "$RUN/containerd.sock"
J
  cat >"$RUN/dockerd.json" <<J
{
  "data-root": "$STORE/data", "exec-root": "$RUN/exec", "pidfile": "$RUN/docker.pid",
  "hosts": ["$SOCKET"], "containerd": "$RUN/containerd.sock",
  "storage-driver": "overlay2", "exec-opts": ["native.cgroupdriver=cgroupfs"], "cgroup-parent": "/$NAME",
  "oom-score-adjust": 0, "iptables": true, "ip6tables": false, "live-restore": false,
  "runtimes": $runtimes, "default-runtime": "$default"
}
J
}

start_private() {
  mkdir -p "$RUN" "$STORE/data" "$STORE/containerd"
  ip netns list | grep -qw "$NETNS" || ip netns add "$NETNS"
  ip -n "$NETNS" link set lo up
  write_config
  pid_of dockerd >/dev/null || rm -f "$RUN/docker.pid" "$RUN/docker.sock" # of one that was killed
  if ! pid_of containerd >/dev/null; then
    rm -f "$RUN/containerd.sock"
    start_daemon "$RUN/containerd.log" "$RUN/containerd.pid" \
      nsenter --net="/run/netns/$NETNS" unshare --mount --propagation slave containerd --config "$RUN/containerd.toml"
  fi
  wait_until 30 "containerd" "$RUN/containerd.log" test -S "$RUN/containerd.sock" || exit 1
  start_daemon "$RUN/dockerd.log" "$RUN/dockerd.pid" \
    nsenter --target "$(pid_of containerd)" --mount --net dockerd --config-file "$RUN/dockerd.json"
  wait_until 60 "dockerd" "$RUN/dockerd.log" private_docker || exit 1
}

up() {
  if own_docker; then
    echo own
    return
  fi
  check_machine
  mkdir -p "$RUN"
  exec 9>"$RUN/start.lock"
  flock -w 120 9 || die 1 "waited 120 s for another start of the private Docker (see: fuser -v $RUN/start.lock)"
  private_docker || { say "starting a private Docker in network namespace $NETNS" && start_private; }
  exec 9>&-
  echo private
}

# Processes of a daemon that was killed can outlive it for a moment; containers of one that was killed do not.
stop_part() {
  local pid
  pid=$(pid_of "$1") || return 0
  kill "$pid"
  wait_until 20 "$1 to end" "$RUN/$1.log" bash -c "! kill -0 $pid" || kill -KILL "$pid" || true
}

remove_containers() {
  local ids
  mapfile -t ids < <(DOCKER_HOST=$SOCKET timeout 20 docker ps -aq)
  [ ${#ids[@]} -eq 0 ] || DOCKER_HOST=$SOCKET timeout 120 docker rm -fv "${ids[@]}" >/dev/null || say "some containers could not be removed"
}

remove_cgroups() {
  local group
  for group in "/sys/fs/cgroup/$NAME" /sys/fs/cgroup/*/"$NAME"; do
    [ -d "$group" ] && find "$group" -depth -type d -exec rmdir {} + 2>/dev/null
  done
  return 0
}

down() {
  [ -d "$RUN" ] || return 0
  exec 8>>"$RUN/users.lock"
  if [ "${1:-}" = --if-idle ]; then
    if ! flock -n 8 || { private_docker && [ -n "$(DOCKER_HOST=$SOCKET docker ps -q)" ]; }; then
      say "the private Docker stays up: others use it (DOCKER_HOST=$SOCKET docker ps)"
      return 0
    fi
  fi
  private_docker && remove_containers
  local part
  for part in "${PARTS[@]}"; do stop_part "$part"; done
  remove_cgroups
  ip netns del "$NETNS" 2>/dev/null || true
  rm -rf "$RUN"
}

case ${1:-} in
  up) up ;;
  env) own_docker || echo "export DOCKER_HOST=$SOCKET" ;;
  in)
    shift
    if ! own_docker; then
      private_docker || die 1 "the private Docker is not up; start it with: $E2E_CLUSTER/docker.sh up"
      export DOCKER_HOST=$SOCKET
      exec 8>>"$RUN/users.lock"
      flock -s 8 # held by CMD, and by what it leaves running
    fi
    exec "$@"
    ;;
  down) down "${2:-}" ;;
  *) die 2 "usage: docker.sh up | env | in CMD... | down [--if-idle]" ;;
esac
