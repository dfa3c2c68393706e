#!/bin/bash
# Installs the missing packages for building and testing, on Debian 12 to 14. Ubuntu 22.04 and 24.04 are
# accepted too: their packages have the same names, but this was not tried there. The script is quick
# and silent when all packages are there.
#
#   third_party/install.sh [--mpi] [--fuzz]
#
# --mpi also installs Open MPI, for --comm=mpi and the tests under mpirun. --fuzz also installs clang, for
# the fuzzers of tests/fuzz.
set -euo pipefail

packages=(
  g++                    # the compiler
  bazel-bootstrap        # Bazel 4.2 or 7.7, and the Java rules that it loads
  bazel-rules-java
  libeigen3-dev          # matmuls on the CPU
  libabsl-dev            # containers, status, strings
  nlohmann-json3-dev     # configurations, metrics, checkpoint headers
  libpcre2-dev           # tokenizers: the patterns that cut text into words
  libsentencepiece-dev   # tokenizers: SentencePiece's
  libutf8proc-dev        # tokenizers: Unicode's normal forms
  libsodium-dev          # HMAC and encryption between the processes of a job
  iproute2               # tests: hosts as network namespaces
  libxxhash-dev          # checksums of checkpoints
  zlib1g-dev             # data: .gz
  libzstd-dev            # data: .zst
  python3-jinja2         # chat templates
  libgtest-dev           # tests
  libgmock-dev
  libbenchmark-dev       # benchmarks
  bible-kjv              # the English text that //train learns by default
  xz-utils               # packs the archive for a GPU machine
)

fail() {
  echo "third_party/install.sh: $*" >&2
  exit 1
}

for option in "$@"; do
  case $option in
    --mpi) packages+=(libopenmpi-dev openmpi-bin) ;;
    --fuzz) packages+=(clang libclang-rt-dev) ;;
    *) fail "there is no option $option; give --mpi or --fuzz" ;;
  esac
done

id='' version=''
if [ -r /etc/os-release ]; then
  id=$(. /etc/os-release && echo "${ID:-}")
  # Debian 14 has a name and no number yet.
  version=$(. /etc/os-release && echo "${VERSION_ID:-${VERSION_CODENAME:-}}")
fi
case "$id $version" in
  "debian 12" | "debian 13")
    # PyTorch for CPUs is for tests of the Python package; without it they say so and pass.
    packages+=(python3-torch python3-venv) ;;
  "debian 14" | "debian forky")
    packages+=(python3-torch python3-venv)
    # Bazel 7 takes the rules that it loads from Debian's packages, which WORKSPACE names.
    echo "common --noenable_bzlmod" >"$(dirname "$0")/../.bazelrc.system" ;;
  "ubuntu 22.04" | "ubuntu 24.04")
    echo "third_party/install.sh: not tried on Ubuntu; its packages have Debian's names." >&2 ;;
  *)
    fail "this script knows Debian 12 to 14 and Ubuntu 22.04 and 24.04, and this is" \
         "${id:-an unknown system} $version. Install by hand what corresponds to: ${packages[*]}" ;;
esac

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null || true)
  [ "$status" = "install ok installed" ] || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || fail "missing ${missing[*]}; run this script as root to install them"
  as_root=(sudo)
fi

echo "Installing ${missing[*]} ..."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1
}
# If the package lists are missing or too old, fetch them and try once more.
install || { "${as_root[@]}" apt-get update >>"$log" 2>&1 && install; } || {
  tail -n 20 "$log" >&2
  fail "could not install ${missing[*]}; apt's last lines are above"
}

cuda=${CUDA_HOME:-/usr/local/cuda}
if [ ! -x "$cuda/bin/nvcc" ]; then
  echo "Installed. No CUDA toolkit at $cuda: building for the CPU only."
elif [ ! -e "$cuda/include/nccl.h" ] && [ ! -e /usr/include/nccl.h ]; then
  echo "Installed. CUDA toolkit at $cuda, but no NCCL: building for the CPU only."
else
  echo "Installed. CUDA toolkit and NCCL found at $cuda."
fi
