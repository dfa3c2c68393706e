#!/bin/bash
# Packs programs with every library that they load, the C library and its loader included, so that they
# run on any Linux of their processor. CUDA's libraries stay those of the machine. They may need a newer C library
# than the archive's, so a program takes the machine's where that is at least as new.
#
#   archive.sh OUT.tar.xz VERSION_HEADER LICENSE TEXT PROGRAM ...
#
# TEXT is the text that `train` learns by default. A PROGRAM named NAME.py takes the machine's python3, and
# Jinja from the archive.
set -euo pipefail

out=$1 header=$2 license=$3 text=$4
programs=("${@:5}")
version=$(sed -n 's/.*kVersion\[\] = "\(.*\)";/\1/p' "$header")
[ -n "$version" ] || { echo "archive.sh: no kVersion in $header" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/burst-$version-linux-x86_64
mkdir -p "$root"/{bin,lib/glibc,libexec,licenses,share/kjv}
getconf GNU_LIBC_VERSION >"$root/lib/glibc/version"  # for example: glibc 2.36
cp -L "$text" "$root/share/kjv/kjv.txt"
cp -L "$license" "$root/licenses/burst"

# add_python NAME.py: adds a program of Python, which finds the other programs in the folder bin.
add_python() {
  local name folder=$root/libexec/python
  name=$(basename "$1" .py)
  mkdir -p "$folder"
  cp -L "$1" "$folder"
  cat >"$root/bin/$name" <<'START'
#!/bin/sh
# Starts the Python program of this script's name with the modules of the archive.
root=$(dirname "$(dirname "$(readlink -f "$0")")")
name=$(basename "$0")
command -v python3 >/dev/null || { echo "$name: python3 must be installed, 3.8 or newer" >&2; exit 1; }
export PYTHONPATH="$root/libexec/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
exec python3 -c 'import os, runpy, sys
sys.argv = sys.argv[1:]
runpy.run_module(os.path.basename(sys.argv[0]), run_name="__main__")' "$root/bin/$name" "$@"
START
  chmod 755 "$root/bin/$name"
}

# A driver of the machine loads the other libraries of glibc, which must have the version of libc.
libraries=(libdl.so.2 libpthread.so.0 libresolv.so.2 librt.so.1 libutil.so.1)
libraries=("${libraries[@]/#//lib/x86_64-linux-gnu/}")
for program in "${programs[@]}"; do
  name=$(basename "$program")
  if [[ $name == *.py ]]; then
    add_python "$program"
    continue
  fi
  install -m 755 "$program" "$root/libexec/$name"
  strip "$root/libexec/$name"
  cat >"$root/bin/$name" <<'START'
#!/bin/sh
# Starts the program of this script's name with the libraries of the archive.
root=$(dirname "$(dirname "$(readlink -f "$0")")")
name=$(basename "$0")
export RUNFILES_DIR="${RUNFILES_DIR:-$root/share}"
loader=$root/lib/glibc/ld-linux-x86-64.so.2 libraries=$root/lib/glibc:$root/lib
machine=$(getconf GNU_LIBC_VERSION 2>/dev/null)
if [ "$(echo "$machine" | sort -V - "$root/lib/glibc/version" | tail -n 1)" = "$machine" ]; then
  loader=/lib64/ld-linux-x86-64.so.2 libraries=$root/lib
fi
exec "$loader" --argv0 "$name" \
  --library-path "$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$root/libexec/$name" "$@"
START
  chmod 755 "$root/bin/$name"
  listed=$(ldd "$program")
  ! grep "not found" <<<"$listed" >&2 || exit 1
  mapfile -t -O ${#libraries[@]} libraries < <(grep -oE '/[^ ]+' <<<"$listed" | grep -vE '/lib(cu|nccl|nv)[^/]*$')
done

# Packages whose code is in the programs, and those of the libraries.
packages=(libabsl-dev libeigen3-dev libpcre2-dev libsodium-dev libutf8proc-dev libxxhash-dev nlohmann-json3-dev)
if [ -d "$root/libexec/python" ]; then
  for module in jinja2 markupsafe; do  # without compiled modules, which serve one version of Python
    packages+=(python3-$module)
    install -D -m 644 -t "$root/libexec/python/$module" /usr/lib/python3/dist-packages/$module/*.py
  done
fi
for library in $(printf '%s\n' "${libraries[@]}" | sort -u); do
  file=$(readlink -f "$library")
  # dpkg knows a file by its path with or without /usr.
  owner=$(dpkg-query -S "$file" 2>/dev/null || dpkg-query -S "${file#/usr}" 2>/dev/null || dpkg-query -S "/usr$file")
  packages+=("${owner%%:*}")
  folder=$root/lib
  [ "${owner%%:*}" != libc6 ] || folder=$root/lib/glibc
  install -m 755 "$file" "$folder/$(basename "$library")"
done
for package in "${packages[@]}"; do
  cp -L "/usr/share/doc/$package/copyright" "$root/licenses/$package"
done

# Programs share GPU kernels of about 100 MB. The dictionary holds two programs, so kernels are packed once.
tar -C "$work" --owner=0 --group=0 --mtime=@0 --sort=name -cf - "$(basename "$root")" |
  xz --threads=1 --lzma2=preset=1,dict=256MiB >"$out"
