#!/usr/bin/env bash
# packages.sh [NVCC]: where the packages are that the build needs, for the Makefile. The compilers find what is
# installed, and what CPATH and LIBRARY_PATH name. What they miss may be in LD_LIBRARY_PATH, or in include/
# beside these folders; in build/python-packages (setup.sh); in .mpich/ (make gpu-bundle); or in the wheels
# that Python has for PyTorch.
# Prints three words:
#   PACKAGE_HEADERS=...    folders with headers that the compilers do not search
#   PACKAGE_LIBRARIES=...  folders with libraries, for the linker and for a program that starts
#   PACKAGES_MISSING=...   packages that are nowhere; NCCL and cuBLAS count where there is an nvcc
# Where the first mpirun in PATH is not that of the MPI library, build/packages/bin gets one, for make's PATH.
set -uo pipefail
shopt -s nullglob
cd "$(dirname "$0")/../.." || exit
cxx=${CXX:-g++} nvcc=${1:-}
multiarch=$("$cxx" -print-multiarch 2> /dev/null)
cuda=${nvcc:+$(dirname "$(dirname "$(realpath "$nvcc")")")}

packages=(CLI11 nlohmann-json Catch2 zlib MPI ${nvcc:+NCCL cuBLAS})
declare -A headers=([CLI11]=CLI/CLI.hpp ["nlohmann-json"]=nlohmann/json.hpp [zlib]=zlib.h [MPI]=mpi.h [NCCL]=nccl.h
  [cuBLAS]=cublas_v2.h [Catch2]='catch2/catch_all.hpp catch2/catch.hpp')
declare -A libraries=([zlib]=libz.so [MPI]=libmpich.so [NCCL]=libnccl.so [cuBLAS]=libcublas.so)

# Debian's packages are unpacked. Its mpirun would be a link that is made when MPICH is installed.
if [ ! -e .mpich/bin/mpirun ]; then
  for package in .mpich/*.deb; do
    [ -e .mpich/lib ] || {
      mkdir -p .mpich/usr/lib
      ln -s usr/lib .mpich/lib
    } # packages use the one or the other
    { dpkg-deb --fsys-tarfile "$package" 2> /dev/null || ar p "$package" data.tar.xz | xz -d; } |
      tar -x --no-same-owner --keep-directory-symlink -C .mpich
  done
  if [ -e .mpich/usr/bin/mpiexec.hydra ]; then
    mkdir -p .mpich/bin
    cat > .mpich/bin/mpirun << END
#!/usr/bin/env bash
usr=\$(realpath "\$(dirname "\$0")/../usr") libraries=\$usr/lib/$multiarch
export LD_LIBRARY_PATH=\$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH} UCX_MODULE_DIR=\$libraries/ucx
exec "\$usr"/bin/mpiexec.hydra "\$@"
END
    chmod +x .mpich/bin/mpirun
  fi
fi

# With the mpirun of another MPI, each process is rank 0 of 1. So it is with Ubuntu 24.04's MPICH, too
# (Ubuntu's bug 2072338); there setup.sh gets one from PyPI, and NCCL, which may be missing beside a CUDA
# toolkit.
pypi=build/python-packages
mpirun='' # the one to take, if that is not the first in PATH
if [ -e $pypi/bin/mpirun ]; then
  ln -sf libmpi.so.12 $pypi/lib/libmpich.so
  mpirun=$PWD/$pypi/bin/mpirun
elif [ -e .mpich/bin/mpirun ]; then
  :
elif [[ $(dpkg-query -W -f '${Version}' mpich 2> /dev/null) == 4.2.0-5build* && $(command -v mpirun) == /usr/bin/* ]]; then
  libraries[MPI]="(broken)"
elif mpich=$(command -v mpirun.mpich); then
  [ "$mpich" -ef "$(command -v mpirun)" ] || mpirun=$mpich
elif [[ $(mpirun --version 2> /dev/null) != *HYDRA* ]]; then
  libraries[MPI]="(no mpirun)"
fi

system=(/usr/lib/"$multiarch" /usr/lib64 /usr/local/lib) # linker and loader look here anyway
header_folders=() library_folders=()
IFS=: read -ra named <<< "${LIBRARY_PATH:-}:${LD_LIBRARY_PATH:-}"
for folder in "${named[@]}"; do
  case $folder in '' | */stubs*) continue ;; esac # a stub is for linking only
  header_folders+=("$folder"/../include) library_folders+=("$folder")
done
header_folders+=($pypi/include $pypi/lib/python3*/site-packages/nvidia/*/include /usr/include/{"$multiarch"/mpich,mpich-*}
  .mpich/usr/include{/"$multiarch"/mpich,} .mpich/include)
library_folders+=($pypi/lib "${system[@]}" $pypi/lib/python3*/site-packages/nvidia/*/lib ${cuda:+"$cuda"/lib64 "$cuda"/lib}
  /usr/lib64/mpich/lib .mpich/usr/lib/"$multiarch" .mpich/lib)

# The packages whose headers the compilers find.
known=" $(for package in "${packages[@]}"; do
  for header in ${headers[$package]}; do printf '#if __has_include(<%s>)\n%s\n#endif\n' "$header" "$package"; done
done | "$cxx" -E -P ${cuda:+-isystem "$cuda"/include} -x c++ - 2> /dev/null | tr '\n' ' ') "

# look_for PACKAGE: puts the folders of its header and of its library into header_folder and library_folder.
look_for() {
  local folder file link
  header_folder='' library_folder=''
  case $known in *" $1 "*) ;; *)
    for folder in "${header_folders[@]}"; do
      for file in ${headers[$1]}; do [ ! -e "$folder/$file" ] || {
        header_folder=$(realpath "$folder")
        break 2
      }; done
    done
    [ -n "$header_folder" ] || return 1
    ;;
  esac
  [ -n "${libraries[$1]:-}" ] || return 0
  for folder in "${library_folders[@]}"; do
    for file in "$folder/${libraries[$1]}"{,.*}; do
      [ -e "$file" ] || continue
      case " ${system[*]} " in *" $folder "*) ;; *) library_folder=$(realpath "$folder") ;; esac
      # A wheel has libnccl.so.2 only, and the linker wants libnccl.so.
      if [ "$file" != "$folder/${libraries[$1]}" ]; then
        mkdir -p build/packages
        link=build/packages/${libraries[$1]}
        [ "$link" -ef "$file" ] || ln -sf "$(realpath "$file")" "$link"
        library_folder=$PWD/build/packages${library_folder:+:$library_folder}
      fi
      return 0
    done
  done
  return 1
}

add_wheels() {
  local folder
  while read -r folder; do
    header_folders+=("$folder"/*/include) library_folders+=("$folder"/*/lib)
  done < <(python3 -c 'import nvidia; print(*nvidia.__path__, sep="\n")' 2> /dev/null)
}

found_headers='' found_libraries='' missing=''
for package in "${packages[@]}"; do
  look_for "$package" || {
    case $package in NCCL | cuBLAS) add_wheels ;; esac
    look_for "$package"
  } ||
    {
      missing+=:$package
      continue
    }
  found_headers+=:$header_folder found_libraries+=:$library_folder
done
case $found_headers in */.mpich/*)
  mpirun=$PWD/.mpich/bin/mpirun
  found_libraries+=:$PWD/.mpich/usr/lib/$multiarch
  ;; # Catch2 3 has a library
esac
# (A link would not do: Hydra looks for its helpers beside the path by which it was started.)
wrapper=build/packages/bin/mpirun
if [ -z "$mpirun" ]; then
  rm -f $wrapper
elif [ "$(tail -n 1 $wrapper 2> /dev/null)" != "exec '$mpirun' \"\$@\"" ]; then
  mkdir -p build/packages/bin
  printf '#!/bin/sh\nexec %s "$@"\n' "'$mpirun'" > $wrapper.new && chmod +x $wrapper.new && mv $wrapper.new $wrapper
fi
list() { tr : '\n' | awk 'NF && !seen[$0]++' | paste -sd :; }
echo "PACKAGE_HEADERS=$(list <<< "$found_headers") PACKAGE_LIBRARIES=$(list <<< "$found_libraries")" \
  "PACKAGES_MISSING=${missing#:}"
