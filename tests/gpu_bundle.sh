#!/usr/bin/env bash
# gpu_bundle.sh ARCHIVE: packs what make gpu-check needs on a machine that reaches no network: this tree, and
# in .mpich/ Debian's packages of MPICH, of the libraries that it needs, and of libraries' headers. There is
# no nvcc, cuBLAS or NCCL in it. Where there is an nvcc, the programs are built here, for GPU_ARCH=90, and
# packed, too; so are what modelled GPUs say, and the bench of OLDER, a commit to compare with. Needs git, and
# the apt-get of a Debian or Ubuntu that is not newer than the system over there.
set -euo pipefail
cd "$(dirname "$0")/.."
archive=$1
apt-cache show mpich > /dev/null 2>&1 || {
  echo "gpu-bundle needs apt-get, and its lists of packages (apt-get update)" >&2
  exit 1
}

# What a machine with g++ has, and Fortran, are left out.
names=() queue=(mpich)
while [ ${#queue[@]} -gt 0 ]; do
  name=${queue[0]} queue=("${queue[@]:1}")
  case " ${names[*]} libc6 libgcc-s1 libstdc++6 libgfortran5 " in *" $name "*) continue ;; esac
  names+=("$name")
  mapfile -t -O ${#queue[@]} queue < <(apt-cache depends "$name" | sed -n 's/^ *Depends: \(lib[^ ]*\)$/\1/p')
done
names+=(libmpich-dev catch2 libcli11-dev nlohmann-json3-dev zlib1g-dev)

folder=build/bundle
rm -rf "$folder"
mkdir -p "$folder"/{.mpich,build} "$(dirname "$archive")"
(cd "$folder"/.mpich && apt-get -qq -o APT::Sandbox::User=root download "${names[@]}")
git log -1 --format='commit %h %s' > "$folder"/.mpich/commit
built=()
if command -v nvcc > /dev/null; then
  export GPU_ARCH=90
  for program in $(tests/gpu_check.sh --programs | grep ^build/); do
    mkdir -p "$folder/$(dirname "$program")"
    strip -o "$folder/$program" "$program" && built=(build)
  done
  [ ! -e build/modelled ] || cp -r build/modelled "$folder"/build/
  if [ -n "${OLDER:-}" ]; then
    git worktree add -f --detach build/older "$OLDER"
    make -C build/older BACKEND=cuda PRECISION=bf16 GPU_ARCH=90 build/cuda-bf16/bench
    install -sD build/older/build/cuda-bf16/bench "$folder"/build/cuda-bf16-older/bench
    git worktree remove --force build/older
  fi
  pwd > "$folder"/.mpich/packed
fi
tar -czf "$archive" --transform 's,^,pentatron/,' -T <(git ls-files) -C "$folder" .mpich "${built[@]}"
echo "${#names[@]} packages: ${names[*]}"
echo "$archive ($(du -h "$archive" | cut -f 1)): over there  tar xzf ${archive##*/} && cd pentatron && make gpu-check"
