#!/bin/sh
# Tests packaging/deps.sh on small archives made here: no network needed.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
t=$(mktemp -d)
trap 'rm -rf "$t"' EXIT
unset BACKEND LLAMA_SRC LLAMA_LIB
export DEPS_FROM="$t/from" DEPS_DEST="$t/dest" DEPS_SUMS="$t/sums" PLATFORM=linux-x64
passed=0 failed=0

deps() { "$root/packaging/deps.sh" >"$t/out" 2>&1; }

# check NAME COMMAND…: one test case.
check() {
	name=$1
	shift
	if "$@"; then
		passed=$((passed + 1))
	else
		failed=$((failed + 1))
		echo "FAIL deps: $name" >&2
		sed 's/^/     /' "$t/out" >&2
	fi
}

says() { grep -q -- "$1" "$t/out"; }
refuses() { ! deps && says "$1"; }

# archive NAME FOLDER: packs FOLDER/package as npm would and pins its sum.
archive() {
	file=$DEPS_FROM/$(echo "$1" | tr -d @ | tr / -)-1.0.0.tgz
	tar -czf "$file" -C "$2" package
	sum=$(for byte in $(sha512sum "$file" | cut -d ' ' -f 1 | sed 's/../& /g'); do
		printf '%b' "\\0$(printf %o "0x$byte")"
	done | base64 -w 0)
	echo "$1 1.0.0 $sum" >>"$DEPS_SUMS"
}

# release TAG: archives whose every file holds TAG.
release() {
	rm -rf "$t/make" "$DEPS_FROM" "$DEPS_SUMS"
	mkdir -p "$t/make/repo/include" "$t/make/repo/ggml/include" "$t/make/repo/ggml/src" \
		"$t/make/h/package/llama" "$DEPS_FROM"
	for f in include/llama.h ggml/include/ggml.h ggml/src/ggml-backend-impl.h LICENSE; do
		echo "$1" >"$t/make/repo/$f"
	done
	(
		cd "$t/make/repo"
		git init -q .
		git add .
		git -c user.name=t -c user.email=t@example.invalid -c commit.gpgsign=false commit -q -m release
		git bundle create -q "$t/make/h/package/llama/gitRelease.bundle" HEAD
	)
	archive node-llama-cpp "$t/make/h"
	for p in linux-x64 linux-x64-vulkan; do
		mkdir -p "$t/make/$p/package/bins/$p"
		for f in libllama.v0.5.0 libggml.v0.5.0 libggml-base; do
			echo "$1" >"$t/make/$p/package/bins/$p/$f.so"
		done
		[ $p = linux-x64 ] || echo "$1" >"$t/make/$p/package/bins/$p/libggml-vulkan.so"
		archive "@node-llama-cpp/$p" "$t/make/$p"
	done
}

# holds TAG: both folders are whole and of that release.
holds() {
	for f in include/llama.h include/ggml.h include/ggml-backend-impl.h \
		lib/libllama.v0.5.0.so lib/libggml.v0.5.0.so lib/libggml-base.so; do
		[ "$(cat "$DEPS_DEST/$f" 2>/dev/null)" = "$1" ] || return 1
	done
}

# whole: each folder is absent, or all of one release: never half of one.
whole() {
	for d in include lib; do
		[ ! -e "$DEPS_DEST/$d" ] && continue
		[ "$(cat "$DEPS_DEST/$d"/*.h "$DEPS_DEST/$d"/*.so 2>/dev/null | sort -u | wc -l)" = 1 ] || return 1
		[ "$(ls "$DEPS_DEST/$d" | grep -c '\.h$\|\.so$')" = 3 ] || return 1
	done
}

# without TOOL: a PATH that has everything deps.sh uses but TOOL.
without() {
	rm -rf "$t/bin"
	mkdir "$t/bin"
	for c in sh awk sed tr grep ls cp mv rm mkdir mktemp rmdir tar gzip base64 od sha512sum cut cat \
		tail dirname uname flock git npm node; do
		[ "$c" = "$1" ] || ln -s "$(command -v "$c" || echo /nonexistent)" "$t/bin/$c"
	done
}

# killing COMMAND N: a PATH whose COMMAND, at its Nth call, kills the script
# with SIGKILL before it does anything.
killing() {
	rm -rf "$t/bin" "$t/calls"
	mkdir "$t/bin"
	real=$(command -v "$1")
	cat >"$t/bin/$1" <<EOF
#!/bin/sh
echo >>"$t/calls"
[ "\$(wc -l <"$t/calls")" != "$2" ] || { kill -9 \$PPID; exit 1; }
exec "$real" "\$@"
EOF
	chmod +x "$t/bin/$1"
}

release one
check "a fresh run lays all" deps
check "a fresh run lays all: files" holds one
check "licence of llama.cpp comes along" [ -s "$DEPS_DEST/lib/LICENSE.llama.cpp" ]

before=$(ls -lid "$DEPS_DEST/include" "$DEPS_DEST/lib" "$DEPS_DEST"/*/*)
without npm
check "a second run needs no network, no npm" env PATH="$t/bin" DEPS_FROM=/nonexistent "$root/packaging/deps.sh" >"$t/out"
check "a second run says so" says "up to date"
check "a second run changes nothing" [ "$(ls -lid "$DEPS_DEST/include" "$DEPS_DEST/lib" "$DEPS_DEST"/*/*)" = "$before" ]

rm "$DEPS_DEST/lib/libggml-base.so"
check "a missing file is brought back" deps
check "a missing file is brought back: files" holds one

release two
echo x >>"$DEPS_FROM/node-llama-cpp-linux-x64-1.0.0.tgz"
check "a wrong sum is refused by name" refuses "wrong SHA-512 of @node-llama-cpp/linux-x64@1.0.0"
check "a wrong sum: says what it wanted" says "want [0-9a-f]\{128\}$"
check "a wrong sum: says what it got" says "got  $(sha512sum "$DEPS_FROM/node-llama-cpp-linux-x64-1.0.0.tgz" | cut -d ' ' -f 1)$"
check "a wrong sum changes nothing" holds one
check "a wrong sum leaves no temporary folder" [ "$(ls "$DEPS_DEST/.deps")" = lock ]

for cmd in git mv; do
	n=1
	while :; do
		release "$cmd$n"
		killing "$cmd" "$n"
		oldpath=$PATH PATH=$t/bin:$PATH
		if deps; then
			PATH=$oldpath
			break
		fi
		PATH=$oldpath
		check "killed at $cmd call $n: nothing is half there" whole
		check "killed at $cmd call $n: the next run repairs" deps
		check "killed at $cmd call $n: the next run repairs: files" holds "$cmd$n"
		n=$((n + 1))
	done
	check "$cmd was interrupted" [ "$n" -gt 1 ]
done

release four
without npm
oldpath=$PATH PATH=$t/bin
check "missing npm is named" refuses "npm is missing: install it"
PATH=$oldpath
without git
PATH=$t/bin
check "missing git is named" refuses "git is missing: install it"
PATH=$oldpath
DEPS_FROM=/nonexistent
check "an unreadable archive is named" refuses "cannot read /nonexistent/node-llama-cpp-1.0.0.tgz"
DEPS_FROM=$t/from
mkdir "$t/empty"
printf '#!/bin/sh\necho "npm error network" >&2\nexit 1\n' >"$t/empty/npm"
chmod +x "$t/empty/npm"
oldpath=$PATH PATH=$t/empty:$PATH DEPS_FROM=
check "no network is said" refuses "cannot fetch node-llama-cpp@1.0.0 with npm: is the network up"
PATH=$oldpath DEPS_FROM=$t/from
PLATFORM=linux-riscv64
check "an unsupported platform is named" refuses "no prebuilt llama.cpp for linux-riscv64"
PLATFORM=linux-x64

export BACKEND=metal
check "an unknown backend is named" refuses "no prebuilt backend 'metal' for linux-x64: known are vulkan"
BACKEND=vulkan
check "a backend comes along" deps
check "a backend comes along: file" [ -s "$DEPS_DEST/lib/libggml-vulkan.so" ]
BACKEND=
check "a plain run keeps the backend" deps
check "a plain run keeps the backend: file" [ -s "$DEPS_DEST/lib/libggml-vulkan.so" ]
BACKEND=none
check "none removes the backend" deps
check "none removes the backend: file" [ ! -e "$DEPS_DEST/lib/libggml-vulkan.so" ]
BACKEND=

export LLAMA_SRC="$t/make/repo"
check "LLAMA_SRC alone is refused" refuses "LLAMA_SRC is set without LLAMA_LIB"
export LLAMA_LIB="$t/own"
check "an empty LLAMA_LIB is refused" refuses "no libllama.so and libggml-base.so in LLAMA_LIB"
mkdir "$t/own"
for f in libllama libggml libggml-base libggml-cpu; do echo own >"$t/own/$f.so"; done
check "an own build is laid" deps
check "an own build has the linked names" [ "$(cat "$DEPS_DEST/lib/libllama.v0.5.0.so")" = own ]
unset LLAMA_SRC LLAMA_LIB
check "a plain run keeps the own build" deps
check "a plain run keeps the own build: says so" says "your own build"

if git -C "$root" rev-parse --git-dir >/dev/null 2>&1; then
	for f in ggml/lib/x.so ggml/include/x.h build/deps/x; do
		check "git does not see $f" git -C "$root" check-ignore -q "$f"
	done
fi

echo "deps: $passed passed, $failed failed"
[ "$failed" = 0 ]
