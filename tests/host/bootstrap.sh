#!/bin/sh
# What Bottlerocket's host-ctr makes for a bootstrap container, as far as it matters: its own root and a
# private /dev, the host's processes and network, the host's root read-only at /.bottlerocket/rootfs with
# its writable mounts kept, and exactly a bootstrap container's capabilities. Runs in a mount namespace.
#   bootstrap.sh ROOT HOST COMMAND...     ROOT: the image's root; HOST: the faked host
set -eu
root=$1 host=$2
shift 2
mount --make-rprivate /
mkdir -p "$root/.bottlerocket/rootfs" "$root/dev" "$root/proc" "$root/run"
mount --bind "$host" "$root/.bottlerocket/rootfs"
mount -o remount,bind,ro "$root/.bottlerocket/rootfs"
for writable in run var dev etc; do
    mount --bind "$host/$writable" "$root/.bottlerocket/rootfs/$writable"
done
mount --rbind /proc "$root/.bottlerocket/rootfs/proc"
mount --rbind /proc "$root/proc"
touch "$root/run/api.sock"
mount --bind "$host/run/api.sock" "$root/run/api.sock"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for node in null:3 zero:5 full:7 random:8 urandom:9; do
    mknod -m 666 "$root/dev/${node%:*}" c 1 "${node#*:}"
done
# containerd's default set, and SYS_ADMIN, NET_ADMIN, SYS_MODULE, AUDIT_CONTROL (SYS_CHROOT is in the default).
caps=+chown,+dac_override,+fsetid,+fowner,+mknod,+net_raw,+setgid,+setuid,+setfcap,+setpcap,+net_bind_service
caps=$caps,+sys_chroot,+kill,+audit_write,+sys_admin,+net_admin,+sys_module,+audit_control
exec setpriv --bounding-set "-all,$caps" --inh-caps "-all" chroot "$root" "$@"
