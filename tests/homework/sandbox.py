"""Builds and runs what others have written: without privileges, network, sources or a way out of its folder, and with
limits on time, memory, processes and output (bubblewrap)."""

import os
import pathlib
import resource
import shutil
from dataclasses import dataclass

from observe import Machine, folder_of
from sources import ROOT, UsageError

NOBODY = 65534
MEMORY, PROCESSES = 4 << 30, 500  # bytes of a process; processes and threads of all


@dataclass
class Sandbox(Machine):
    """A tree whose programs run like this. Everything that they see is read-only but one folder."""
    build_seconds: int = 180  # what does not change is compiled already

    def start(self, command, folder, environment, building):
        tree = str(self.tree)
        argv = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
                "--ro-bind", "/usr", "/usr"]
        for link in ("bin", "lib", "lib32", "lib64", "sbin"):
            if pathlib.Path("/", link).is_symlink():
                argv += ["--symlink", os.readlink(f"/{link}"), f"/{link}"]
            elif pathlib.Path("/", link).is_dir():
                argv += ["--ro-bind", f"/{link}", f"/{link}"]
        for path in ("/etc/alternatives", "/etc/ld.so.cache", ROOT / ".mpich"):
            argv += ["--ro-bind-try", str(path), str(path)]
        argv += ["--ro-bind", "/sys", "/sys", "--proc", "/proc", "--dev", "/dev", "--size", str(256 << 20), "--tmpfs", "/tmp"]
        seen = [ROOT / "common/clock/profiles"]
        if building:
            argv += ["--bind", tree, tree, "--chdir", tree]
        else:
            seen += [self.tree / "LICENSE"]
            argv += ["--bind", folder, folder, "--chdir", folder]
            for races in (False, True):
                seen += [p for p in (self.tree / folder_of(races)).glob("*") if p.is_file() and os.access(p, os.X_OK)]
        for path in seen:
            argv += ["--ro-bind-try", str(path), str(path)]
        if os.environ.get("SANDBOX") == "container":  # made for one submission, and thrown away
            argv = []
        threads = any("tsan" in name.lower() for name in environment)

        def limits():
            os.nice(5)
            if not threads:  # ThreadSanitizer reserves more than there is
                resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            resource.setrlimit(resource.RLIMIT_NPROC, (used() + PROCESSES,) * 2)

        keep = {k: v for k, v in environment.items() if k.startswith(("UCX_", "OMP_", "TSAN_", "LC_", "OPENBLAS_"))}
        return [*argv, *command], keep | {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp"}, limits

    def own(self, path):
        """The user of the sandbox may write there."""
        if os.getuid() == 0:
            os.chown(path, NOBODY, NOBODY)
            for folder, folders, files in os.walk(path):
                for name in folders + files:
                    os.lchown(os.path.join(folder, name), NOBODY, NOBODY)


def used():
    """Processes and threads that this user has already."""
    number = 0
    for process in pathlib.Path("/proc").glob("[0-9]*/task"):
        try:
            number += len(list(process.iterdir())) if process.stat().st_uid == os.getuid() else 0
        except OSError:
            pass
    return number


def check_sandbox(tree):
    """Raises UsageError where there is no sandbox to be had."""
    if os.environ.get("SANDBOX") == "container":
        return
    if not shutil.which("bwrap"):
        raise UsageError("sandbox: bwrap is missing (package bubblewrap); submissions are not run without it")
    status, output = Sandbox(tree).call(["true"], str(tree / "build"), 20)
    if status != 0:
        raise UsageError(f"sandbox: bwrap does not start: {(output.strip() or 'no message').splitlines()[-1][:160]}")
