#!/usr/bin/env bash
# setup.sh [cpu|cuda [COMMAND:PACKAGE...]]: finds out what the build needs and does not have, and which of
# these commands (MODULE.py: modules of Python), and installs it where apt-get can (Debian, Ubuntu). NCCL, and
# MPICH where the system's is broken, come from PyPI, into build/python-packages. Elsewhere one line says what
# is missing. That is a failure; with cuda only if nothing can be built without it.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit

missing=()   # packages, by Debian's names
from_pypi=() # by pip's
others=()    # that neither has
has_command() { command -v "$1" > /dev/null; }
has_command "${CXX:-g++}" || missing+=(g++)
nvcc=''
[ "${1:-cpu}" = cpu ] || nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ -x "$nvcc" ] || nvcc=''
found=$(common/build/packages.sh $nvcc)
IFS=: read -ra absent <<< "${found##*PACKAGES_MISSING=}"
for package in "${absent[@]}"; do
  case $package in
    CLI11) missing+=(libcli11-dev) ;;
    nlohmann-json) missing+=(nlohmann-json3-dev) ;;
    Catch2) missing+=(catch2) ;;
    zlib) missing+=(zlib1g-dev) ;;
    MPI)
      [[ $(mpirun --version 2> /dev/null) != *"Open MPI"* ]] || echo "mpirun is Open MPI's; this tree takes MPICH"
      if grep -qs '^VERSION_CODENAME=noble' /etc/os-release; then # whose own is broken (packages.sh)
        from_pypi+=(mpich==4.3.2)
      else
        missing+=(mpich libmpich-dev)
      fi
      ;;
    NCCL) from_pypi+=("nvidia-nccl-cu$("$nvcc" --version | sed -n 's/.*release \([0-9]*\).*/\1/p')==2.28.9") ;;
    cuBLAS) others+=("cuBLAS, a part of the CUDA toolkit") ;;
  esac
done
[ ${#from_pypi[@]} -eq 0 ] || /usr/bin/python3 -c 'import ensurepip' 2> /dev/null || missing+=(python3-venv)
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

reason="there is no apt-get"
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  as_root=(sudo)
  has_command sudo || reason="not root, and there is no sudo"
fi
# apt WHAT...: a network that does not answer is given up soon.
apt() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get -qq -o Acquire::http::Timeout=10 -o Acquire::Retries=0 "$@" 3>&1 > /dev/null 2>&3 # errors only
}
if [ ${#missing[@]} -gt 0 ] && has_command apt-get && has_command "${as_root[0]:-true}"; then
  echo "Installs ${missing[*]}"
  apt update > /dev/null
  if said=$(apt install -y --no-install-recommends "${missing[@]}"); then missing=(); else reason=$(tail -n 1 <<< "$said"); fi
fi
if [ ${#missing[@]} -eq 0 ] && [ ${#from_pypi[@]} -gt 0 ]; then
  echo "Installs ${from_pypi[*]} in build/python-packages"
  if /usr/bin/python3 -m venv build/python-packages &&
    build/python-packages/bin/pip install -q --disable-pip-version-check "${from_pypi[@]}"; then from_pypi=(); else reason="pip has failed"; fi
fi
missing+=("${from_pypi[@]}" "${others[@]}")
[ ${#missing[@]} -eq 0 ] && exit 0
echo "Missing: ${missing[*]}; what needs them cannot be built ($reason)" >&2
[ "${1:-cpu}" = cuda ] || exit 1
case " ${missing[*]} " in *" g++ "* | *" libcli11-dev "* | *" nlohmann-json3-dev "* | *" zlib1g-dev "*) exit 1 ;; esac
exit 0
