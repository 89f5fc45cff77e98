#!/bin/sh
# Builds llama.cpp's own server and its RPC server from the release that `make deps`
# fetches, for `make bench-server` and `make bench-peers`: llama-server and
# ggml-rpc-server in build/llama-server/bin. It takes a while, once.
# Needs cmake and g++ (Debian: apt-get install cmake g++).
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
out=$root/build/llama-server
[ ! -x "$out/bin/llama-server" ] || [ ! -x "$out/bin/ggml-rpc-server" ] || exit 0
command -v cmake >/dev/null || {
	echo "llama-server: cmake is missing: install it (Debian: apt-get install cmake g++)" >&2
	exit 1
}
if [ ! -d "$out/src" ]; then
	rm -rf "$out/part"
	"$root/packaging/deps.sh" source "$out/part"
	mv "$out/part" "$out/src"
fi
# As the libraries of `make deps`: no OpenMP. No web page, no TLS, RPC over TCP alone.
cmake -S "$out/src" -B "$out" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_OPENMP=OFF -DGGML_RPC=ON -DGGML_RPC_RDMA=OFF \
	-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF
cmake --build "$out" --target llama-server ggml-rpc-server -j "$(nproc)"
