#!/bin/sh
# Lays llama.cpp's headers in ggml/include and its libraries in ggml/lib.
#
# From npm, by exact version and pinned SHA-512 (packaging/deps.sums):
#   the platform package has the libraries, node-llama-cpp has the headers
#   (a git bundle of the same llama.cpp release).
#
# Settings (environment, or `make deps NAME=value`):
#   BACKEND=vulkan|cuda   also lay that backend (a list is fine; none removes)
#   LLAMA_SRC, LLAMA_LIB  use your own llama.cpp: its source folder and the
#                         folder with its built lib*.so
#   DEPS_FROM             folder with the archives, for a machine without network
#   DEPS_DEST             where include/ and lib/ go (default ggml)
#   DEPS_SUMS             other list of pinned sums
#   PLATFORM              linux-x64, linux-arm64, linux-armv7l (default: this one)
#
# `deps.sh source FOLDER` lays the whole source of the release in FOLDER instead.
#
# Order that makes an interrupted run harmless: everything is built in a
# temporary folder on the same disk, then each of the two folders is replaced
# by a rename. A folder carries a stamp with what it was made from, so a mix
# of old and new is seen and done again.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
dest=${DEPS_DEST:-$root/ggml}
sums=${DEPS_SUMS:-$root/packaging/deps.sums}
work=$root/build/deps
[ -z "${DEPS_DEST:-}" ] || work=$dest/.deps

die() {
	echo "make deps: $*" >&2
	exit 1
}

need() {
	command -v "$1" >/dev/null 2>&1 || die "$1 is missing: install it (on Debian: apt-get install $2)"
}

# pinned NAME COLUMN: a column of the package's line in the list of sums.
pinned() {
	awk -v name="$1" -v col="$2" '$1 == name { print $col }' "$sums"
}

platform() {
	[ -z "${PLATFORM:-}" ] || { echo "$PLATFORM"; return; }
	case $(uname -s)/$(uname -m) in
	Linux/x86_64) echo linux-x64 ;;
	Linux/aarch64 | Linux/arm64) echo linux-arm64 ;;
	Linux/armv7l | Linux/armv8l) echo linux-armv7l ;;
	*) echo "$(uname -s) $(uname -m)" ;;
	esac
}

# verify NAME FILE: compares the file's SHA-512 with the pinned one.
verify() {
	want=$(pinned "$1" 3 | base64 -d 2>/dev/null | od -An -v -tx1 | tr -d ' \n')
	got=$(sha512sum "$2" | cut -d ' ' -f 1)
	[ "$want" = "$got" ] || die "wrong SHA-512 of $1@$(pinned "$1" 2)
  want $want
  got  $got
Nothing was changed. Try again; if it stays, the archive is not the one that was pinned."
}

# fetch NAME: brings the package as $tmp/archive.tgz, verified.
fetch() {
	spec=$1@$(pinned "$1" 2)
	echo "fetching $spec"
	if [ -n "${DEPS_FROM:-}" ]; then
		file=$DEPS_FROM/$(echo "$1" | tr -d @ | tr / -)-$(pinned "$1" 2).tgz
		cp "$file" "$tmp/archive.tgz" 2>/dev/null || die "cannot read $file (DEPS_FROM is set)"
	else
		mkdir "$tmp/pack"
		(cd "$tmp/pack" && npm pack --silent --ignore-scripts "$spec") >"$tmp/npm.log" 2>&1 || {
			tail -n 5 "$tmp/npm.log" >&2
			die "cannot fetch $spec with npm: is the network up? (offline: put the archives in a folder and set DEPS_FROM)"
		}
		mv "$tmp"/pack/*.tgz "$tmp/archive.tgz"
		rmdir "$tmp/pack"
	fi
	verify "$1" "$tmp/archive.tgz"
}

# headers SOURCE: llama.cpp's public headers and the backend interface, flat.
headers() {
	cp "$1"/include/*.h "$1"/ggml/include/*.h "$1/ggml/src/ggml-backend-impl.h" "$tmp/include/" ||
		die "$1 is not a llama.cpp source folder"
}

# release FOLDER [PATH…]: the source of the pinned release, or these parts of it.
release() {
	need npm npm
	need git git
	folder=$1
	shift
	mkdir "$tmp/pkg"
	fetch node-llama-cpp
	tar -xzf "$tmp/archive.tgz" -C "$tmp/pkg" package/llama/gitRelease.bundle
	git clone -q --bare "$tmp/pkg/package/llama/gitRelease.bundle" "$tmp/llama.git" 2>"$tmp/git.log" ||
		die "git cannot read the bundle of node-llama-cpp: $(cat "$tmp/git.log")"
	git -C "$tmp/llama.git" archive HEAD "$@" | tar -x -C "$folder"
}

from_npm() {
	mkdir "$tmp/src"
	release "$tmp/src" include ggml/include ggml/src/ggml-backend-impl.h LICENSE
	headers "$tmp/src"
	cp "$tmp/src/LICENSE" "$tmp/lib/LICENSE.llama.cpp"

	fetch "@node-llama-cpp/$plat"
	tar -xzf "$tmp/archive.tgz" -C "$tmp/pkg"
	cp "$tmp/pkg/package/bins/$plat"/*.so "$tmp/lib/"
	for b in $backends; do
		fetch "@node-llama-cpp/$plat-$b"
		tar -xzf "$tmp/archive.tgz" -C "$tmp/pkg" "package/bins/$plat-$b/libggml-$b.so"
		cp "$tmp/pkg/package/bins/$plat-$b/libggml-$b.so" "$tmp/lib/"
	done
}

# from_own: the names that the #cgo lines link are made where the own build
# calls its libraries otherwise.
from_own() {
	headers "$LLAMA_SRC"
	ls "$LLAMA_LIB"/libllama.so* "$LLAMA_LIB"/libggml-base.so* >/dev/null 2>&1 ||
		die "no libllama.so and libggml-base.so in LLAMA_LIB=$LLAMA_LIB: build llama.cpp with -DBUILD_SHARED_LIBS=ON -DGGML_BACKEND_DL=ON"
	cp -P "$LLAMA_LIB"/lib*.so* "$tmp/lib/"
	for n in llama ggml; do
		[ -e "$tmp/lib/lib$n.v0.5.0.so" ] || ln -s "lib$n.so" "$tmp/lib/lib$n.v0.5.0.so"
	done
}

# wanted: what the stamp says when all is there.
wanted() {
	if [ -n "${LLAMA_SRC:-}" ]; then
		echo "own $LLAMA_SRC $LLAMA_LIB"
		return
	fi
	echo "platform $plat"
	for p in node-llama-cpp "@node-llama-cpp/$plat" $(for b in $backends; do echo "@node-llama-cpp/$plat-$b"; done); do
		echo "$p $(pinned "$p" 2) $(pinned "$p" 3)"
	done
}

# complete FOLDER: its stamp is the wanted one and every file it lists is there.
complete() {
	[ -f "$1/.stamp" ] && [ "$(grep -v '^file ' "$1/.stamp")" = "$(wanted)" ] || return 1
	sed -n 's/^file //p' "$1/.stamp" | while read -r f; do
		[ -s "$1/$f" ] || exit 1
	done
}

# replace NAME: puts the new folder in place of the old by renames.
replace() {
	{ wanted; (cd "$tmp/$1" && ls | sed 's/^/file /'); } >"$tmp/stamp"
	mv "$tmp/stamp" "$tmp/$1/.stamp"
	[ ! -e "$dest/$1" ] || mv "$dest/$1" "$tmp/old-$1"
	mv "$tmp/$1" "$dest/$1"
}

check_settings() {
	[ -n "${LLAMA_SRC:-}" ] || [ -z "${LLAMA_LIB:-}" ] || die "LLAMA_LIB is set without LLAMA_SRC: set both"
	[ -z "${LLAMA_SRC:-}" ] || [ -n "${LLAMA_LIB:-}" ] || die "LLAMA_SRC is set without LLAMA_LIB: set both"
	[ -z "${LLAMA_SRC:-}" ] || return 0
	[ -n "$(pinned "@node-llama-cpp/$plat" 2)" ] ||
		die "no prebuilt llama.cpp for $plat: build llama.cpp and set LLAMA_SRC and LLAMA_LIB"
	for b in $backends; do
		[ -n "$(pinned "@node-llama-cpp/$plat-$b" 2)" ] ||
			die "no prebuilt backend '$b' for $plat: known are $(awk -v p="@node-llama-cpp/$plat-" 'index($1, p) == 1 { printf "%s ", substr($1, length(p) + 1) }' "$sums")(or build llama.cpp and set LLAMA_SRC and LLAMA_LIB)"
	done
}

if [ "${1:-}" = source ]; then
	mkdir -p "$work" "$2"
	tmp=$(mktemp -d "$work/source.XXXXXX")
	trap 'rm -rf "$tmp"' EXIT
	release "$2"
	exit 0
fi
plat=$(platform)
backends=$(echo "${BACKEND:-}" | tr , ' ')
own=$(sed -n 's/^own //p' "$dest/lib/.stamp" 2>/dev/null || true)
if [ -z "${LLAMA_SRC:-}${LLAMA_LIB:-}${BACKEND:-}" ]; then
	# A plain run, as `make build` does one, keeps what was chosen before.
	if [ -n "$own" ]; then
		echo "llama.cpp: your own build ($own); make clean-deps goes back to the pinned one"
		exit 0
	fi
	backends=$(sed -n "s|^@node-llama-cpp/$plat-\([^ ]*\) .*|\1|p" "$dest/lib/.stamp" 2>/dev/null | tr '\n' ' ' || true)
fi
[ "$backends" != none ] || backends=
check_settings
if [ -z "${LLAMA_SRC:-}" ] && complete "$dest/include" && complete "$dest/lib"; then
	echo "llama.cpp: up to date in $dest"
	exit 0
fi

mkdir -p "$work" "$dest"
exec 9>"$work/lock"
if command -v flock >/dev/null 2>&1; then
	flock 9
fi
rm -rf "$work"/tmp.* # left by a killed run; the lock says that no other is at work
tmp=$(mktemp -d "$work/tmp.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
trap 'exit 130' INT TERM HUP
mkdir "$tmp/include" "$tmp/lib"
if [ -n "${LLAMA_SRC:-}" ]; then from_own; else from_npm; fi
replace include
replace lib
echo "llama.cpp: headers in $dest/include, libraries in $dest/lib"
