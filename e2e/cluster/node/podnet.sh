#!/bin/sh
# The pod network of a node, in place of kindnetd (and under its name, so that kind's own manifest starts it): a CNI
# configuration for this node's range of pods, a route to the range of every other node, and masquerading of what leaves
# the pod network. It does not enforce NetworkPolicies.
set -u
CONFIG=/etc/cni/net.d/10-kindnet.conflist

write_config() { # $1: the range
  new=$(
    cat <<J
{"cniVersion": "0.4.0", "name": "kindnet", "plugins": [
  {"type": "ptp", "ipMasq": false, "mtu": 1500,
   "ipam": {"type": "host-local", "dataDir": "/run/cni-ipam-state", "routes": [{"dst": "0.0.0.0/0"}], "ranges": [[{"subnet": "$1"}]]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}
]}
J
  )
  [ "$new" = "$(cat "$CONFIG" 2>/dev/null)" ] && return
  echo "$new" >"$CONFIG.new" && mv "$CONFIG.new" "$CONFIG" && echo "pods of this node: $1"
}

masquerade() {
  iptables -w -t nat -N PODNET-MASQ 2>/dev/null
  iptables -w -t nat -C POSTROUTING -s "$POD_SUBNET" -m addrtype ! --dst-type LOCAL -j PODNET-MASQ 2>/dev/null && return
  iptables -w -t nat -A PODNET-MASQ -d "$POD_SUBNET" -j RETURN
  iptables -w -t nat -A PODNET-MASQ -j MASQUERADE
  iptables -w -t nat -A POSTROUTING -s "$POD_SUBNET" -m addrtype ! --dst-type LOCAL -j PODNET-MASQ
}

NODES='{range .items[*]}{.spec.podCIDR} {.status.addresses[?(@.type=="InternalIP")].address}{"\n"}{end}'
pause=2
while :; do
  masquerade
  if kubectl get nodes -o "jsonpath=$NODES" >/tmp/nodes; then
    while read -r range address; do
      [ -n "${address:-}" ] || continue # a node that has no range or address yet
      if [ "$address" = "$HOST_IP" ]; then write_config "$range"; else ip route replace "$range" via "$address"; fi
      pause=10
    done </tmp/nodes
  fi
  sleep "$pause"
done
