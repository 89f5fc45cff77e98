#!/bin/sh
# Builds llama.cpp's own server from the release that `make deps` fetches, for
# `make bench-server`: build/llama-server/bin/llama-server. It takes a while, once.
# Needs cmake and g++ (Debian: apt-get install cmake g++).
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
out=$root/build/llama-server
[ ! -x "$out/bin/llama-server" ] || exit 0
command -v cmake >/dev/null || {
	echo "llama-server: cmake is missing: install it (Debian: apt-get install cmake g++)" >&2
	exit 1
}
if [ ! -d "$out/src" ]; then
	rm -rf "$out/part"
	"$root/packaging/deps.sh" source "$out/part"
	mv "$out/part" "$out/src"
fi
# As the libraries of `make deps`: no OpenMP. No web page, no TLS.
cmake -S "$out/src" -B "$out" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_OPENMP=OFF \
	-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF
cmake --build "$out" --target llama-server -j "$(nproc)"
