#!/usr/bin/env bash
# setup.sh [cpu|cuda [COMMAND:PACKAGE...]]: finds out what the build needs and does not have, and which of these commands
# (MODULE.py: modules of Python), and installs it where apt-get can (Debian, Ubuntu). Elsewhere one line says what is
# missing. That is a failure; with cuda only if nothing can be built without it.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

missing=()     # packages, by Debian's names
has_command() { command -v "$1" > /dev/null; }
has_command "${CXX:-g++}" || missing+=(g++)
found=$(common/packages.sh)
IFS=: read -ra absent <<< "${found##*PACKAGES_MISSING=}"
for package in "${absent[@]}"; do
  case $package in
    CLI11) missing+=(libcli11-dev) ;;
    nlohmann-json) missing+=(nlohmann-json3-dev) ;;
    Catch2) missing+=(catch2) ;;
    MPI) missing+=(mpich libmpich-dev) ;;
  esac
done
# Any BLAS may have brought a cblas.h, so the library is asked for.
multiarch=$("${CXX:-g++}" -print-multiarch 2> /dev/null)
links_with() { echo 'int main() {}' | ${CXX:-g++} -x c++ - -o /dev/null "$@" > /dev/null 2>&1; }
[ "${1:-cpu}" = cuda ] || links_with "-L/usr/lib/$multiarch/openblas-openmp" -lopenblas ||
  missing+=(libopenblas-openmp-dev)
for needed in "${@:2}"; do
  case $needed in
    *.py:*) /usr/bin/python3 -c "import ${needed%.py:*}" 2> /dev/null || missing+=("${needed#*:}") ;;
    *) has_command "${needed%:*}" || missing+=("${needed#*:}") ;;
  esac
done

[ ${#missing[@]} -eq 0 ] && exit 0
as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo); fi
# apt WHAT...: a network that does not answer is given up soon.
apt() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get -qq -o Acquire::http::Timeout=10 -o Acquire::Retries=0 "$@" 3>&1 > /dev/null 2>&3  # errors only
}
reason="no apt-get"
if has_command apt-get && has_command "${as_root[0]:-true}"; then
  echo "Installs ${missing[*]}"
  apt update > /dev/null
  reason=$(apt install -y --no-install-recommends "${missing[@]}") && exit 0
  reason=$(tail -n 1 <<< "$reason")
fi
echo "Missing, by Debian's names: ${missing[*]}; what needs them cannot be built ($reason)" >&2
[ "${1:-cpu}" = cuda ] || exit 1
case " ${missing[*]} " in *" g++ "* | *" libcli11-dev "* | *" nlohmann-json3-dev "*) exit 1 ;; esac
exit 0
