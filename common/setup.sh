#!/usr/bin/env bash
# setup.sh [COMMAND:PACKAGE...]: finds out what the build needs and does not have, and which of these commands, and
# installs it with apt-get where there is one (Debian, Ubuntu). Elsewhere it prints the names and stops.
set -euo pipefail

missing=()     # packages, by Debian's names
has_header() { echo "#include <$1>" | ${CXX:-g++} -std=c++20 -E -x c++ - "${@:2}" > /dev/null 2>&1; }

command -v "${CXX:-g++}" > /dev/null || missing+=(g++)
has_header CLI/CLI.hpp || missing+=(libcli11-dev)
has_header nlohmann/json.hpp || missing+=(nlohmann-json3-dev)
has_header catch2/catch.hpp || has_header catch2/catch_all.hpp || missing+=(catch2)
multiarch=$("${CXX:-g++}" -print-multiarch 2> /dev/null || true)
# Any BLAS may have brought a cblas.h, so the library is asked for.
links_with() { echo 'int main() {}' | ${CXX:-g++} -x c++ - -o /dev/null "$@" > /dev/null 2>&1; }
links_with "-L/usr/lib/$multiarch/openblas-openmp" -lopenblas || missing+=(libopenblas-openmp-dev)
command -v mpirun > /dev/null && has_header mpi.h "-I/usr/include/$multiarch/mpich" || missing+=(mpich libmpich-dev)
for needed in "$@"; do command -v "${needed%:*}" > /dev/null || missing+=("${needed#*:}"); done

[ ${#missing[@]} -eq 0 ] && exit 0
echo "Missing: ${missing[*]} (names of Debian's packages)"
as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo); fi
if ! command -v apt-get > /dev/null || ! command -v "${as_root[0]:-true}" > /dev/null; then
  echo "Install them, then try again." >&2
  exit 1
fi
"${as_root[@]}" apt-get -qq update
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}"
