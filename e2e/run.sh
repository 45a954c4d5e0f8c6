#!/usr/bin/env bash
# Run the tests of this folder on a cluster, and leave none behind.
#
#   run.sh [pytest options]
#
# On the cluster of $KUBECONFIG, if that is set, which is neither made nor deleted nor given images: E2E_VALUES names Helm
# values with images that it can pull. Else on the cluster of `make cluster-up`, if it is up; else on one that is made for
# the run and deleted after it (KEEP=1 leaves it).
# Exit 3: something is missing on this machine, and the last line of stderr says what and how to get it.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
CLUSTER_SH=e2e/cluster/cluster.sh
PYTHON=${PYTHON:-.venv/bin/python}
export PYTHON

lack() {
  echo "e2e: $1" >&2
  exit 3
}

ours=${KVFERRY_CACHE:-$HOME/.cache/kvferry}/clusters/${CLUSTER:-kvferry}/kubeconfig
if [ "${KUBECONFIG:-$ours}" = "$ours" ]; then
  if ! "$CLUSTER_SH" status; then
    [ -n "${KEEP:-}" ] || trap '"$CLUSTER_SH" down' EXIT
    "$CLUSTER_SH" up "${NODES:-2}"
    export E2E_KEEP=1 # the release goes with the cluster
  else
    "$CLUSTER_SH" load
  fi
  environment=$("$CLUSTER_SH" env)
  eval "$environment"
else
  for program in kubectl "${E2E_HELM:-helm}"; do
    command -v "$program" >/dev/null || lack "no $program here, which tests on a cluster of yours use; eval \"\$(make -s cluster-env)\" has one after make cluster-up"
  done
  said=$(kubectl get namespaces --request-timeout=20s 2>&1 >/dev/null) ||
    lack "the cluster of KUBECONFIG=$KUBECONFIG does not answer: ${said##*$'\n'}"
  [ -n "${E2E_VALUES:-}" ] || lack "a cluster of yours needs our images. make images builds them, your registry gives them to it, and \
Helm values name them: E2E_VALUES=values.yaml with images.operator, images.router and images.runtime (repository and tag), as in \
e2e/values-kind.yaml. Pods fetch the demo model from PyPI, unless PIP_INDEX_URL in the image says another index"
  [ -r "$E2E_VALUES" ] || lack "E2E_VALUES: there is no file $E2E_VALUES"
  export E2E_VALUES
fi
timeout "${E2E_LIMIT_S:-3600}" "$PYTHON" -m pytest e2e -p no:randomly "$@"
