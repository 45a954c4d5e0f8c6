#!/bin/sh
# /sbin/init of a node. systemd and the kubelet write settings that belong to the whole machine, not to a container: they
# get files to write to instead, and the machine keeps its own.
mkdir -p /kind/sysctls
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
  kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000 fs/file-max= fs/nr_open= kernel/pid_max=; do
  name=${setting%%=*}
  value=${setting#*=}
  [ -e "/proc/sys/$name" ] || continue
  file=/kind/sysctls/$(echo "$name" | tr / .)
  echo "${value:-$(cat "/proc/sys/$name")}" >"$file"
  mount --bind "$file" "/proc/sys/$name"
done
exec /lib/systemd/systemd "$@"
