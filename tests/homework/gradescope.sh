#!/usr/bin/env bash
# gradescope.sh ZIP SUBMISSION RESULTS: grades a submission with the zip of make gradescope-NN, as Gradescope documents it
# (https://gradescope-autograders.readthedocs.io/en/latest/specs/). As root: in a root of its own, a copy on write of this
# machine's, the zip lies in /autograder/source, and setup.sh is run once. Then run_autograder is called in /autograder, and
# RESULTS gets its results.json. Nothing is left over.
set -euo pipefail
[ "$(id -u)" = 0 ] || { echo "gradescope: not root; expected root, who may make another root" >&2; exit 2; }
[ -n "${OWN_ROOT:-}" ] || OWN_ROOT=1 exec unshare --mount --pid --fork --kill-child "$0" "$(realpath "$1")" "$(realpath "$2")" "$(realpath -m "$3")"
top=$(mktemp -d)
trap 'umount -lR "$top" 2> /dev/null; rmdir "$top"' EXIT
mount -t tmpfs tmpfs "$top"
mkdir "$top"/{changed,work,root}
root=$top/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$top/changed,workdir=$top/work" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mkdir -p "$root"/autograder/{source,submission,results}
python3 - "$1" "$root/autograder/source" << 'END'
import os, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as archive:
    for entry in archive.infolist():
        os.chmod(archive.extract(entry, sys.argv[2]), entry.external_attr >> 16)
END
cp "$root"/autograder/{source/run_autograder,}
chroot "$root" env -i "PATH=$PATH" HOME=/root bash -c 'cd /autograder/source && ./setup.sh'
cp "$2" "$root/autograder/submission"
chroot "$root" env -i "PATH=$PATH" HOME=/root bash -c 'cd /autograder && ./run_autograder' > "$root/autograder/results/stdout" 2>&1 || {
  tail -n 20 "$root/autograder/results/stdout" >&2; exit 1; }
cp "$root/autograder/results/results.json" "$3"
