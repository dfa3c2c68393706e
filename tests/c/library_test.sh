#!/bin/bash
# Checks that libburst.so shows only burst_* and holds its C++ library. It must load without CUDA, NCCL
# and Abseil, and with glibc 2.28.
set -euo pipefail

library=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../../burst/c/libburst.so
[ -e "$library" ] || library=burst/c/libburst.so

fail() {
  echo "$*"
  exit 1
}

# nm also lists local thread-local variables, in lower case.
shown=$(nm -D --defined-only "$library" | awk '$2 ~ /[A-Z]/ { print $3 }')
[ "$(grep -c '^burst_' <<<"$shown")" -ge 15 ] || fail "too few functions: $shown"
others=$(grep -v '^burst_' <<<"$shown" || true)
[ -z "$others" ] || fail "more than the interface is visible: $others"

needed=$(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
for name in $needed; do
  case $name in
    libc.so.6 | libm.so.6 | libdl.so.2 | librt.so.1 | libpthread.so.0 | ld-linux-*) ;;
    libgcc_s.so.1 | libstdc++.so.6) ;;
    *) fail "it needs $name" ;;
  esac
done

# With STATIC_TLS it could not be loaded into a process whose threads have no room left.
! readelf -d "$library" | grep -q STATIC_TLS || fail "it needs static thread-local storage"

undefined=$(nm -D --undefined-only "$library")
cxx=$(grep -E 'GLIBCXX|CXXABI' <<<"$undefined" | grep -v ' w ' || true)
[ -z "$cxx" ] || fail "it needs a C++ library: $cxx"
newest=$(grep -o 'GLIBC_[0-9.]*' <<<"$undefined" | sort -uV | tail -n 1)
[ "$(printf '%s\n' GLIBC_2.28 "$newest" | sort -V | tail -n 1)" = GLIBC_2.28 ] ||
  fail "it needs $newest"
