"""Builds and runs what others have written: without privileges, network, sources or a way out of its folder,
and with limits on time, memory, processes, output and disk (bubblewrap). A run sees its program, the MPI
launcher, and folders of libraries; no_programs.cc forbids to start anything."""

import functools
import os
import pathlib
import re
import resource
import shutil
import subprocess
import tempfile
from dataclasses import dataclass

from observe import Machine, folder_of
from sources import ROOT, UsageError

NOBODY = 65534
MEMORY, PROCESSES = 4 << 30, 500  # bytes of a process; processes and threads of all
COMPILER_SECONDS = 180  # of a core, for each file; what does not change is compiled already
QUOTA = 256 << 20  # bytes, each: of what is written into /tmp, /dev/shm and a run's folder
NO_PROGRAMS = ROOT / "build/homework/no_programs.so"


@dataclass
class Sandbox(Machine):
    """A tree whose programs run like this."""

    build_seconds: int = 900

    def start(self, command, folder, environment, building, results):
        tree = str(self.tree)
        bound = [self.tree / "common/clock/profiles", "/etc/alternatives", "/etc/ld.so.cache"]
        argv = "bwrap --unshare-all --die-with-parent --new-session --cap-drop ALL".split()
        argv += "--ro-bind /sys /sys --proc /proc --dev /dev".split() + quota("/tmp") + quota("/dev/shm")
        if building:
            for path in ("usr", "bin", "lib", "lib32", "lib64", "sbin"):
                if pathlib.Path("/", path).is_symlink():
                    argv += ["--symlink", os.readlink(f"/{path}"), f"/{path}"]
                elif pathlib.Path("/", path).is_dir():
                    bound.append(f"/{path}")
            argv += ["--bind", tree, tree]
        else:
            several = command[0] == "mpirun"
            program = pathlib.Path(command[3 if several else 0])
            # The reference's, of the same configuration.
            others = (ROOT / program.parent.relative_to(self.tree)).glob("0*")
            bound += [self.tree / "LICENSE", program, NO_PROGRAMS, *libraries_of(next(others))]
            preload = ["LD_PRELOAD", str(NO_PROGRAMS)]
            if several:
                launcher = launcher_of(shutil.which("mpirun") or "mpirun")
                bound += [launcher, launcher.with_name("hydra_pmi_proxy"), *libraries_of(launcher)]
                command = [str(launcher), "-genv", *preload, *command[1:]]
            else:
                argv += ["--setenv", *preload]
            # Results are written in place, and can't be removed or replaced. Nothing else comes out.
            argv += [
                *quota(folder),
                *[word for path in results for word in ("--bind", str(path), str(path))],
                "--chdir",
                folder,
            ]
        for path in bound:
            argv += ["--ro-bind-try", str(path), str(path)]
        argv += ["--chdir", tree] * building + ["--remount-ro", "/dev", "--remount-ro", "/"]
        threads = any("tsan" in name.lower() for name in environment)

        def limits():
            os.nice(5)
            if not threads:  # ThreadSanitizer reserves more than there is
                resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            if building:
                resource.setrlimit(resource.RLIMIT_CPU, (COMPILER_SECONDS,) * 2)
            resource.setrlimit(resource.RLIMIT_NPROC, (used() + PROCESSES,) * 2)

        keep = {
            k: v
            for k, v in environment.items()
            if k.startswith(("UCX_", "OMP_", "TSAN_", "LC_", "OPENBLAS_", "TEST_NUMBER"))
        }
        return [*argv, *command], keep | {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp"}, limits

    def own(self, path):
        """The user of the sandbox may write there."""
        if os.getuid() == 0:
            os.chown(path, NOBODY, NOBODY)
            for folder, folders, files in os.walk(path):
                for name in folders + files:
                    os.lchown(os.path.join(folder, name), NOBODY, NOBODY)


def quota(folder):
    """A folder of its own, empty at first, which holds so much."""
    return ["--size", str(QUOTA), "--tmpfs", folder]


def launcher_of(mpirun):
    """The program itself, where make's PATH has a script that starts it (common/build/packages.sh): there is no
    shell in the sandbox."""
    started = re.search(rb"\nexec '(.+)' \"\$@\"\n$", pathlib.Path(mpirun).read_bytes()[-4096:])
    return pathlib.Path(os.fsdecode(started[1]) if started else mpirun).resolve()


@functools.lru_cache(maxsize=None)
def libraries_of(program):
    """The loader, and the folders from which a program gets its libraries; those that it loads later lie
    there, too. Not for what somebody handed in, because ldd may run what it is asked about."""
    paths = re.findall(
        r"(/\S+) \(0x", subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    )
    folders = {pathlib.Path(path).parent for path in paths if "/ld-" not in path}
    return [path for path in paths if "/ld-" in path] + sorted(
        folders | {folder.resolve() for folder in folders}
    )


def used():
    """Processes and threads that this user has already."""
    number = 0
    for process in pathlib.Path("/proc").glob("[0-9]*/task"):
        try:
            number += len(list(process.iterdir())) if process.stat().st_uid == os.getuid() else 0
        except OSError:
            pass
    return number


def check_sandbox(tree, program):
    """Raises UsageError where there is no sandbox to be had."""
    if not shutil.which("bwrap"):
        raise UsageError("sandbox: bwrap is missing (package bubblewrap); submissions are not run without it")
    with tempfile.TemporaryDirectory(dir=tree / "build") as folder:
        command = ["mpirun", "-n", "2", str(tree / folder_of() / program), "--dry-run", "--steps", "1"]
        status, output = Sandbox(tree).call([*command, "--data", str(tree / "LICENSE")], folder, 20)
    if status != 0:
        raise UsageError(
            f"sandbox: nothing runs in it: {(output.strip() or 'no message').splitlines()[-1][:160]}"
        )
