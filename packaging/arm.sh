#!/bin/sh
# Builds kvasird for ARM (aarch64) in build/arm64/bin, on another machine, and prints the
# command that runs it here, in emulation where need be. Progress goes to stderr.
# QEMU_CPU names the emulated CPU (default: a phone's core of 2018).
set -eu
unset LLAMA_SRC LLAMA_LIB # of this machine, not of that one
root=$(cd "$(dirname "$0")/.." && pwd)
dest=$root/build/arm64
for tool in aarch64-linux-gnu-gcc qemu-aarch64; do
	command -v "$tool" >/dev/null || {
		echo "make test-arm: $tool is missing: install it (on Debian: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross libstdc++6-arm64-cross qemu-user)" >&2
		exit 1
	}
done
BACKEND=none PLATFORM=linux-arm64 DEPS_DEST=$dest "$root/packaging/deps.sh" >&2
cd "$root"
# libllama's own libraries are looked for when it is linked; libstdc++ is there at run time.
GOOS=linux GOARCH=arm64 CGO_ENABLED=1 CC=aarch64-linux-gnu-gcc \
	CGO_LDFLAGS="-L$dest/lib -Wl,-rpath,$dest/lib -Wl,--allow-shlib-undefined" \
	go build -o "$dest/bin/kvasird" ./cmd/kvasird >&2
echo "env QEMU_LD_PREFIX=/usr/aarch64-linux-gnu QEMU_CPU=${QEMU_CPU:-cortex-a76} qemu-aarch64 $dest/bin/kvasird"
