#!/usr/bin/env bash
# Run the tests of this folder on a cluster, and leave none behind.
#
#   run.sh [pytest options]
#
# On the cluster of $KUBECONFIG, if that is set; else on that of `make cluster-up`, if it is up; else on one that is made
# for the run and deleted after it (KEEP=1 leaves it). E2E_VALUES names Helm values whose images a cluster of yours has.
# Exit 3: something is missing on this machine, and the last line of stderr says what and how to get it.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
CLUSTER_SH=e2e/cluster/cluster.sh
PYTHON=${PYTHON:-.venv/bin/python}
export PYTHON

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
fi
timeout "${E2E_LIMIT_S:-3600}" "$PYTHON" -m pytest e2e -p no:randomly "$@"
