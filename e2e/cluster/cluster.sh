#!/usr/bin/env bash
# A kind cluster on this machine with kvferry's images loaded.
#
#   cluster.sh up [NODES]    make it (default 2 nodes); does nothing if it is there
#   cluster.sh status        exit 0 if its API server answers
#   cluster.sh env           print what a shell needs: eval "$(cluster.sh env)"
#   cluster.sh load          make the images anew from the working tree and load them
#   cluster.sh down          delete it, and stop the private Docker unless somebody else uses it
#
#   CLUSTER=kvferry   its name          IMAGE=published|build|NAME   the nodes' image (see node-image.sh)
#   PYTHON=.venv/bin/python             whose packages the pods use (see quick_images.py)
#
# Exit 3: something is missing on this machine, and the last line of stderr says what and how to get it.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$(readlink -f "$0")")/lib.sh"

CLUSTER=${CLUSTER:-kvferry}
HOME_FOLDER=$CACHE/clusters/$CLUSTER # kubeconfig, settings, images, logs
PYTHON=${PYTHON:-$E2E_CLUSTER/../../.venv/bin/python}
KUBECONFIG=$HOME_FOLDER/kubeconfig
export KUBECONFIG
HERE=$E2E_CLUSTER/cluster.sh

in_docker() { "$E2E_CLUSTER/docker.sh" in "$@"; }
is_up() { [ -e "$HOME_FOLDER/up" ] && timeout 20 "$HOME_FOLDER/bin/kubectl" version --request-timeout=10s >/dev/null 2>&1; }

need_environment() {
  "$PYTHON" -c 'import torch, kopf' 2>/dev/null ||
    die 3 "$PYTHON has no torch and kopf, which the pods would use; make it with: make install-dev"
}

free_port() { "$PYTHON" -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])'; }

# ---- up: outside of Docker ----

up() {
  local nodes=$1 bin
  [[ $nodes =~ ^[1-9]$ ]] || die 2 "NODES: got '$nodes'; 1 to 9 nodes are accepted"
  if is_up; then
    say "cluster $CLUSTER is up already"
    return
  fi
  need_environment
  bin=$("$E2E_CLUSTER/../tools/build.sh" kind helm | tail -1)
  "$E2E_CLUSTER/docker.sh" up >/dev/null
  stop_forward
  mkdir -p "$HOME_FOLDER/bin"
  ln -sfn "$bin/kubectl" "$HOME_FOLDER/bin/kubectl"
  ln -sfn "$bin/helm${HELM:-4}" "$HOME_FOLDER/bin/helm"
  ln -sfn "$bin/helm3" "$HOME_FOLDER/bin/helm3"
  ln -sfn "$bin/helm4" "$HOME_FOLDER/bin/helm4"
  ln -sfn "$bin/kind" "$HOME_FOLDER/bin/kind"
  in_docker "$HERE" up-in-docker "$bin" "$nodes"
  start_forward
  touch "$HOME_FOLDER/up"
  wait_until 60 "the API server" "$HERE env; kubectl cluster-info" is_up || exit 1
  say "cluster $CLUSTER is up: eval \"\$(make -s cluster-env)\""
}

# ---- up: with Docker ----

write_config() { # BIN NODES IMAGE
  local number
  cat <<Y
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
name: $CLUSTER
networking: {apiServerPort: $(free_port)}
kubeadmConfigPatches:
- |
  kind: ClusterConfiguration
  apiVersion: kubeadm.k8s.io/v1beta4
  controllerManager:
    extraArgs:
    - {name: node-monitor-period, value: 2s}
    - {name: node-monitor-grace-period, value: 16s}
- |
  kind: KubeletConfiguration
  apiVersion: kubelet.config.k8s.io/v1beta1
  nodeStatusUpdateFrequency: 4s
nodes:
Y
  for ((number = 0; number < $2; number++)); do
    echo "- role: $([ "$number" = 0 ] && echo control-plane || echo worker)"
    echo "  extraMounts:"
    "$PYTHON" - "$HOME_FOLDER/mounts.json" <<'P'
import json, sys
for mount in json.load(open(sys.argv[1])):
    print("  - " + json.dumps({"hostPath": mount["source"], "containerPath": mount["destination"], "readOnly": True}))
P
    echo "  - {hostPath: $HOME_FOLDER/cri-base.json, containerPath: /etc/containerd/cri-base.json, readOnly: true}"
  done
}

# The specification that a node's containerd starts every container from, with the folders of Python mounted.
write_container_spec() { # IMAGE
  timeout 300 docker run --rm --entrypoint cat "$1" /etc/containerd/cri-base.json >"$HOME_FOLDER/cri-base.node.json" ||
    die 1 "image $1 has no /etc/containerd/cri-base.json, or Docker cannot run it"
  "$PYTHON" - "$HOME_FOLDER" <<'P'
import json, pathlib, sys
home = pathlib.Path(sys.argv[1])
spec = json.loads((home / "cri-base.node.json").read_text())
spec["mounts"] = spec.get("mounts") or []
for mount in json.loads((home / "mounts.json").read_text()):
    spec["mounts"].append({
        "source": mount["destination"], "destination": mount["destination"], "type": "bind", "options": ["rbind", "ro"],
    })
(home / "cri-base.json").write_text(json.dumps(spec))
P
}

up_in_docker() {
  local bin=$1 nodes=$2 image
  image=$("$E2E_CLUSTER/node-image.sh" "$bin" "${IMAGE:-}" | tail -1)
  say "making kvferry's images"
  "$PYTHON" "$E2E_CLUSTER/quick_images.py" "$HOME_FOLDER" || die 1 "the images could not be made"
  write_container_spec "$image"
  write_config "$bin" "$nodes" >"$HOME_FOLDER/kind.yaml"
  "$bin/kind" delete cluster --name "$CLUSTER" >/dev/null 2>&1 || true # one that was left half made
  say "creating $nodes nodes"
  if ! timeout 600 "$bin/kind" create cluster --config "$HOME_FOLDER/kind.yaml" --image "$image" --wait 180s --retain >"$HOME_FOLDER/create.log" 2>&1; then
    timeout 60 "$bin/kind" export logs --name "$CLUSTER" "$HOME_FOLDER/logs" >/dev/null 2>&1 || true
    "$bin/kind" delete cluster --name "$CLUSTER" >/dev/null 2>&1 || true
    die 1 "kind could not create the cluster; see $HOME_FOLDER/create.log and $HOME_FOLDER/logs"
  fi
  load
  finish_nodes "$bin" "$nodes"
}

# Every node takes pods, also the control plane's; kubectl runs where the API server can be reached.
finish_nodes() {
  local control=$CLUSTER-control-plane
  node_kubectl() { docker exec "$control" kubectl --kubeconfig=/etc/kubernetes/admin.conf "$@"; }
  node_kubectl wait --for=condition=Ready node --all --timeout=120s >/dev/null ||
    die 1 "waited 120 s for the nodes to be ready; see: docker exec $control journalctl -u kubelet"
  [ "$2" = 1 ] || node_kubectl taint nodes "$control" node-role.kubernetes.io/control-plane- >/dev/null
}

load() {
  local archive
  say "loading kvferry's images"
  for archive in images hub; do
    timeout 300 "$HOME_FOLDER/bin/kind" load image-archive "$HOME_FOLDER/$archive.tar" --name "$CLUSTER" >"$HOME_FOLDER/load.log" 2>&1 ||
      die 1 "kind could not load the images; see $HOME_FOLDER/load.log"
  done
}

reload() {
  local mounts
  is_up || die 1 "cluster $CLUSTER is not up; make cluster-up"
  mounts=$(cat "$HOME_FOLDER/mounts.json")
  "$PYTHON" "$E2E_CLUSTER/quick_images.py" "$HOME_FOLDER" || die 1 "the images could not be made"
  if [ "$mounts" != "$(cat "$HOME_FOLDER/mounts.json")" ]; then
    echo "$mounts" >"$HOME_FOLDER/mounts.json"
    die 1 "cluster $CLUSTER mounts another Python; make cluster-down, then make cluster-up"
  fi
  in_docker "$HERE" load-in-docker
}

# ---- the way in ----

api_port() { sed -n 's/.*server: https:\/\/127.0.0.1:\([0-9]*\).*/\1/p' "$KUBECONFIG"; }

# Only the private Docker hides the API server in a network namespace.
start_forward() {
  local namespace=/run/netns/$PRIVATE_DOCKER port
  [ -n "$("$E2E_CLUSTER/docker.sh" env)" ] || return 0
  port=$(api_port)
  start_daemon "$HOME_FOLDER/forward.log" "$HOME_FOLDER/forward.pid" "$PYTHON" "$E2E_CLUSTER/forward.py" "$namespace" "$port"
}

stop_forward() {
  local pid
  pid=$(cat "$HOME_FOLDER/forward.pid" 2>/dev/null) || return 0
  ! grep -qs forward.py "/proc/$pid/cmdline" || kill "$pid"
  rm -f "$HOME_FOLDER/forward.pid"
}

environment() {
  [ -e "$HOME_FOLDER/up" ] || die 1 "cluster $CLUSTER is not up; make cluster-up"
  "$E2E_CLUSTER/docker.sh" env
  echo "export KUBECONFIG=$KUBECONFIG CLUSTER=$CLUSTER"
  echo "export PATH=$HOME_FOLDER/bin:\$PATH"
}

down() {
  stop_forward
  rm -f "$HOME_FOLDER/up"
  if [ -d "$HOME_FOLDER" ] && timeout 30 "$E2E_CLUSTER/docker.sh" in docker version >/dev/null 2>&1; then
    in_docker timeout 120 "$HOME_FOLDER/bin/kind" delete cluster --name "$CLUSTER" >/dev/null 2>&1 || say "kind could not delete $CLUSTER"
  fi
  "$E2E_CLUSTER/docker.sh" down --if-idle
}

case ${1:-} in
  up) up "${2:-2}" ;;
  up-in-docker) up_in_docker "$2" "$3" ;;
  status) is_up ;;
  env) environment ;;
  load) reload ;;
  load-in-docker) load ;;
  down) down ;;
  *) die 2 "usage: cluster.sh up [NODES] | status | env | load | down" ;;
esac
