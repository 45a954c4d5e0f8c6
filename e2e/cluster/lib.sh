# shellcheck shell=bash
# What the scripts of this folder share: words for people, waits that end, and where things lie.

E2E_CLUSTER=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
CACHE=${KVFERRY_CACHE:-$HOME/.cache/kvferry} # outside the clone, shared by all clones of this user
PRIVATE_DOCKER=${KVFERRY_DOCKER:-kvferry-docker} # name of the private Docker, its network namespace and its cgroup
export E2E_CLUSTER CACHE PRIVATE_DOCKER
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin # ip, iptables, debootstrap: not in every shell

say() { echo "cluster: $*" >&2; }

# die CODE WORDS...: 1 something failed, 2 wrong use, 3 something is missing on this machine.
die() {
  local code=$1
  shift
  say "$@"
  exit "$code"
}

# wait_until SECONDS WHAT LOOK CMD...: until CMD succeeds; LOOK says where the reason is seen if it never does.
wait_until() {
  local limit=$1 what=$2 look=$3 deadline
  shift 3
  deadline=$((SECONDS + limit))
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$deadline" ] || {
      say "waited $limit s for $what; see: $look"
      return 1
    }
    sleep 0.2
  done
}

# start_daemon LOG PIDFILE CMD...: a process that outlives this script and holds nothing of its caller, such as locks.
start_daemon() {
  local log=$1 pidfile=$2
  shift 2
  (
    for fd in /proc/self/fd/*; do
      fd=${fd##*/}
      [ "$fd" -le 2 ] || [ "$fd" = 255 ] || eval "exec $fd>&-" # 255 is bash's own, closed for programs
    done
    exec setsid "$@" >"$log" 2>&1 </dev/null
  ) &
  echo $! >"$pidfile"
}

# Whether all these commands exist; prints those that do not.
missing() {
  local command absent=()
  for command in "$@"; do command -v "$command" >/dev/null || absent+=("$command"); done
  [ ${#absent[@]} -eq 0 ] || echo "${absent[*]}"
}

# A hash of files' names and contents: what is built from equal files is equal.
hash_of() {
  local paths
  paths=$(find "$@" -type f -print | LC_ALL=C sort)
  while read -r path; do
    printf '%s %s\n' "${path#"$E2E_CLUSTER"/}" "$(sha256sum <"$path")"
  done <<<"$paths" | sha256sum | cut -c1-12
}

# Install Debian packages where the machine's owner said so (KVFERRY_APT=1, as CI does); otherwise say what to type.
install_packages() { # COMMANDS-THAT-LACK PACKAGES...
  local lacking=$1
  shift
  if [ "${KVFERRY_APT:-}" != 1 ]; then
    die 3 "these commands are missing: $lacking. Install them (on Debian: apt-get update && apt-get install -y --no-install-recommends $*), or say KVFERRY_APT=1"
  fi
  say "installing $*"
  DEBIAN_FRONTEND=noninteractive timeout 600 bash -c 'apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@"' apt "$@" >&2 ||
    die 1 "apt-get could not install $*"
}
