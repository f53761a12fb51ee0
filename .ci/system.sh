#!/bin/sh
# Debian packages that kvtool profits from. As root on Debian they are installed; elsewhere what is missing is named, and the build goes on.
set -eu
extra=${1:-}
[ "$extra" = cpu ] || exit 0
for lib in /usr/lib/*/openblas-pthread/libopenblas.so.0 /usr/lib64/libopenblasp.so.0; do
  [ -e "$lib" ] && exit 0
done
if [ -r /etc/debian_version ] && [ "$(id -u)" = 0 ]; then
  apt-get update -q >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -q libopenblas0-pthread >/dev/null && exit 0
fi
echo "note: OpenBLAS not found; MLX's CPU build then runs about 15 times slower (Debian: apt-get install libopenblas0-pthread)" >&2
