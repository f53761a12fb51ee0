#!/bin/sh
# Debian packages that kvtool profits from. As root on Debian they are installed; elsewhere what is missing is named, and the build goes on.
set -eu
extra=${1:-}
missing=

note() { echo "note: $1 (Debian: apt-get install $2)" >&2; }

have_openblas() {
  for lib in /usr/lib/*/openblas-pthread/libopenblas.so.0 /usr/lib64/libopenblasp.so.0; do
    [ -e "$lib" ] && return 0
  done
  return 1
}
arm_wanted() { [ "$(uname -sm)" = "Linux x86_64" ]; }
have_redis() { command -v redis-server >/dev/null || command -v valkey-server >/dev/null; }
have_chromium() { command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; }
have_nginx() { command -v nginx >/dev/null || [ -x /usr/sbin/nginx ]; }
have_clang() { [ "$(uname -sm)" != "Linux x86_64" ] || command -v clang-19 >/dev/null; }
# Clang's sanitizers are a package of their own, which its package only recommends.
have_sanitizers() { [ "$(uname -sm)" != "Linux x86_64" ] || ls /usr/lib/llvm-19/lib/clang/19/lib/*/libclang_rt.msan* >/dev/null 2>&1; }

check() {
  missing=
  [ "$extra" != cpu ] || have_openblas || missing="$missing libopenblas0-pthread"
  have_clang || missing="$missing clang-19"
  have_sanitizers || missing="$missing libclang-rt-19-dev"
  have_redis || missing="$missing redis-server"
  have_chromium || missing="$missing chromium"
  ! arm_wanted || command -v aarch64-linux-gnu-g++ >/dev/null || missing="$missing g++-aarch64-linux-gnu"
  ! arm_wanted || command -v qemu-aarch64 >/dev/null || missing="$missing qemu-user"
}

# Named alone: its package would start a web server on this machine.
have_nginx || note "no nginx; the tests then skip the service behind a proxy" nginx-light
check
[ -n "$missing" ] || exit 0
if [ -r /etc/debian_version ] && [ "$(id -u)" = 0 ]; then
  apt-get update -q >/dev/null || true
  for package in $missing; do
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$package" >/dev/null || true
  done
  check
fi
for package in $missing; do
  case $package in
    libopenblas0-pthread) note "OpenBLAS not found; MLX's CPU build then runs about 15 times slower" "$package" ;;
    g++-aarch64-linux-gnu) note "no compiler for aarch64; the tests then skip NEON" "$package" ;;
    qemu-user) note "no emulator of aarch64; the tests then skip NEON" "$package" ;;
    chromium) note "no chromium; the tests then skip the page of the service" "$package" ;;
    redis-server) note "no redis-server; the tests then skip stores on Redis and Valkey" "$package" ;;
    libclang-rt-19-dev) note "no sanitizers of clang 19; the tests then skip the native back end under them" "$package" ;;
    clang-19) note "clang 19 not found; the tests then skip the Metal kernels" "$package" ;;
  esac
done
