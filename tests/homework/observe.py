"""Builds a stage's program, runs it, and compares what it logged with what the reference logs: losses,
gradient norms, bytes by collective, memory by purpose, modelled time. No wall-clock time is looked at
anywhere."""

import json
import math
import os
import pathlib
import re
import resource
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field

from sources import HERE, ROOT, bodies_of, read_note, tokens

FILE_SECONDS = 5  # to compile one, beside another
BUILD_SECONDS, RUN_SECONDS = 1200, 40  # after these a build, or a run of half a second, hangs
PROBE_SECONDS = 60  # of all probes of an exercise; one hangs after 20 (probe.h)
FILE_BYTES, BUILT_BYTES = 32 << 20, 256 << 20  # of a file that a run, or a compiler, writes
WATCH_SECONDS = 10  # between two looks at a build
OUTPUT_BYTES, LINE = 1 << 20, 2000  # of what it prints that is read, and of a line
NUMBERS = 1e-9  # relative: sums in another order differ less in fp64, mistakes more
COPIES = r"^step \d+: \S+ is not the same on all ranks"  # said after the log is written
PARITY = ("loss", "grad_norm", "lr", "values")  # the rest is what it costs


@dataclass
class Machine:
    """How commands are started: here as they are; submissions.py starts them in a sandbox."""

    tree: pathlib.Path
    seconds: int = RUN_SECONDS
    build_seconds: int = BUILD_SECONDS

    def start(self, command, folder, environment, building, results):
        return command, environment, None

    def own(self, path):
        pass

    def call(self, command, folder, seconds, extra=None, building=False, results=(), watch=None):
        """(exit status, output). A command that takes too long is killed with all that it started, status
        124. results: files, which are there, that it writes. watch: gets the output so far, now and then."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
        environment |= {"UCX_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1", "LC_ALL": "C"} | (extra or {})
        command, environment, limits = self.start(command, folder, environment, building, results)

        def prepare():
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (BUILT_BYTES if building else FILE_BYTES,) * 2)
            if limits:
                limits()

        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                cwd=self.tree,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=prepare,
            )
            try:
                while watch and seconds > WATCH_SECONDS and process.poll() is None:
                    seconds -= WATCH_SECONDS
                    try:
                        process.wait(WATCH_SECONDS)
                    except subprocess.TimeoutExpired:
                        watch(os.pread(output.fileno(), OUTPUT_BYTES, 0))
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = 124
                os.killpg(process.pid, signal.SIGTERM)  # mpirun ends its ranks
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    pass
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            output.seek(0)
            return status, "".join(
                line[:LINE] for line in output.read(OUTPUT_BYTES).decode(errors="replace").splitlines(True)
            )


class BuildError(Exception):
    """The program does not compile: the compiler's first error."""


def folder_of(races=False):
    return "build/cpu-fp64-thread" if races else "build/cpu-fp64"


def build(machine, programs, races=False):
    """Compiles these programs in fp64; `races`: for ThreadSanitizer."""
    # With this CURDIR all trees have the same commands, and so may copy each other's object files.
    command = ["make", "--no-print-directory", f"-j{os.cpu_count()}", f"CURDIR={ROOT}"]
    command += ["WERROR=", "BACKEND=cpu", "PRECISION=fp64", f"SANITIZE={'thread' if races else ''}"]
    command += [f"{folder_of(races)}/{p}" for p in sorted(programs)]
    watch = progress_of(machine, command) if machine == Machine(ROOT) else None
    status, output = machine.call(command, machine.tree, machine.build_seconds, building=True, watch=watch)
    if status == 0:
        return
    if status == 124:
        raise BuildError(f"the compiler needs more than {machine.build_seconds} s")
    lines = [line for line in output.splitlines() if re.search(r"\berror\b|\*\*\*|undefined reference", line)]
    raise BuildError(
        (lines or output.splitlines() or ["no output"])[0].replace(str(machine.tree) + "/", "")[:300]
    )


# What machine code may call: this project, CUDA and NCCL, mathematics, and what C++ itself needs. Nothing of
# it ends the process well, prints, or reaches a file.
MAY_CALL = re.compile(
    r"""
    (\w+\ )?pentatron::(?!trace::) | (cuda|nccl|cublas)[A-Z]\w*\( | operator\ (new|delete) |
    (typeinfo|vtable|VTT|typeinfo\ name)\ for\ | _Unwind_ | __cxa_ | __gxx_ | __tsan_ | _ZGV |
    std::(__throw_|\w+_error::|out_of_range::|invalid_argument::|exception::|bad_\w+::|_Rb_tree_|_Hash_bytes|
          __detail::(_List_node|_Prime_rehash)|(basic_)?ostream\b|ios_base::|basic_ios<|locale::|
          __cxx11::basic_(string|stringbuf|o?stringstream)<) |
    (__dso_handle|_GLOBAL_OFFSET_TABLE_|__libc_single_threaded|__stack_chk_fail|__errno_location|
     __assert_fail|__popcount.i2|mem(cpy|move|set|cmp|chr)|str(len|cmp|to[dl])|v?snprintf|(m|c|re)alloc|free|
     std::(nothrow|terminate\(\))|
     (exp|exp2|expm1|log|log2|log10|log1p|pow|sqrt|cbrt|hypot|sin|cos|sincos|tan|a?(sin|cos|tan)h?|atan2|
      f?abs|fmin|fmax|fmod|fma|floor|ceil|trunc|(ll?)?r(ound|int)|nearbyint|remainder|ldexp|frexp|modf|[lt]gamma|
      erfc?)[fl]?)$
    """,
    re.X,
)


def objects_of(stage, numbers, races=False):
    """The object files, in a folder of builds, that have the machine code of these exercises: those of a file
    with kernels, or of the program that includes a header, and what else of the stage may include it; and those
    of the probe, which no build for races has."""
    files = {e.file for e in stage.exercises.values() if e.file.startswith(stage.program)}
    for exercise in (stage.exercises[number] for number in numbers):
        program = stage.runs[exercise.runs[0]].program
        main = f"{program}/main.cu" if program == stage.program else f"{stage.program}/{program}.cu"
        files.add(exercise.file if exercise.file.endswith(".cu") else main)
    if not races:
        files.add(f"tests/homework/probes/{stage.number}.cu")
    return sorted(f"objects/{file}.o" for file in files if file.endswith(".cu"))


def calls_of(machine, name, races=False):
    """What an object file needs of others, and of libraries."""
    status, output = machine.call(
        ["nm", "-uC", f"{folder_of(races)}/{name}"], machine.tree, 60, building=True
    )
    if status:
        raise BuildError(f"nm: {output[:200]}")
    return re.findall(r"^ +[UvVwW] (.*)$", output, re.M)


def progress_of(machine, command):
    """Says how many files are compiled, and how long that will take: the first time minutes."""
    would = machine.call([*command, "-n"], machine.tree, 60, building=True)[1]
    files = sum(not (machine.tree / name).exists() for name in re.findall(r" -o (\S+\.o)$", would, re.M))
    if files < 5:
        return None
    begin = time.monotonic()
    say = lambda words: print(words, file=sys.stderr, flush=True)
    say(f"{files} files have to be compiled first; that takes about {files * FILE_SECONDS / 60:.0f} min.")

    def watch(output):
        done = max(0, output.count(b"compile ") - os.cpu_count())
        # As fast as so far; at first, as if five had been as fast as they usually are.
        pace = (time.monotonic() - begin + 5 * FILE_SECONDS) / (done + 5)
        left = pace * (files - done) / 60
        say(f"{done} of {files} files, about {left:.0f} min to go")

    return watch


# ---- What a run shows


@dataclass
class Observation:
    end: str = "ok"  # or how it ended
    facts: dict = field(default_factory=dict)  # name: list of numbers, or of lines
    races: list = field(default_factory=list)  # "fill_constant writes what all_gather reads"


def observe(machine, run, seed=None, races=False, keep=None):
    """Runs a program once. `seed`: as a teacher's grader runs it, with the hidden options; None: the visible
    run. `keep`: a path, to which .json and .trace are added: where its log and its timeline are kept."""
    with tempfile.TemporaryDirectory(dir=machine.tree / "build") as folder:
        log, trace = pathlib.Path(folder) / "log.json", pathlib.Path(folder) / "trace"
        results = (log, trace) if keep else (log,)
        for path in results:
            path.touch()
        machine.own(folder)
        command = [str(machine.tree / folder_of(races) / run.program), *run.options]
        main = run.program != "collectives"
        if main:
            command += ["--data", str(machine.tree / "LICENSE"), "--log-json", str(log)]
        if seed is not None:
            command += [*run.hidden, "--seed", str(seed)]
        if keep:
            command += ["--trace", str(trace)]
        if run.ranks > 1 or not main:
            command += ["--timeout", "120" if races else "15"]
        if run.program != "01_single_gpu":
            command = ["mpirun", "-n", str(run.ranks), *command]
        extra = {"UCX_MEM_EVENTS": "n", "TSAN_OPTIONS": "halt_on_error=1:exitcode=66"} if races else {}
        status, output = machine.call(
            command, folder, machine.seconds * (5 if races else 1), extra, results=results
        )
        seen = Observation(races=races_in(output))
        if status != 0:
            seen.end = "a data race" if seen.races else end_of(status, output)
            if "ring_all_reduce failed" in output:  # what a few numbers became is printed before
                seen.end, seen.facts = "ok", facts_of_primer(output, "other sums than NCCL's behind")
            elif re.search(COPIES, output, re.M):  # the numbers say first where it began
                seen.facts = facts_of_log(log)
        elif any(option.startswith("--show-") for option in run.options):
            seen.facts = {"picture": output.splitlines()}
        elif main:
            seen.facts = facts_of_log(log)
            if keep and seen.facts:
                pathlib.Path(f"{keep}.trace").write_text(text_of(trace))
                pathlib.Path(f"{keep}.json").write_text(text_of(log).replace(str(trace), f"{keep}.trace"))
        else:
            seen.facts = facts_of_primer(output)
        if status == 0 and not seen.facts:
            seen.end = "it ended without a result"
        return seen


def end_of(status, output):
    """In words how a run ended that did not end well. Where several ranks speak, a stub comes first."""
    if found := re.search(r"\d\d\.\d is not written yet \(\S+\)", output):
        return found.group()
    if status == 124 or re.search(r"stands? still|holds? up|waits? for ever|deadlock", output):
        return "it hangs"
    if found := re.search(
        rf"^step \d+: the loss is .*|{COPIES}", output, re.M
    ):  # it is NaN or infinite, or the copies differ
        return found.group()
    lines = [
        line.strip()
        for line in output.splitlines()
        if re.search(r"fail|not valid|error|does not|cannot|terminate", line, re.I)
        and not re.search(r"hwloc|libuc|^\s*\d+ +/", line)  # the last one is a frame of a stack
    ]
    lines = [re.sub(r"^(rank \d+[^:]*|\S*what\(\)): *", "", line) for line in lines]
    return lines[0][:160] if lines else f"it ends with status {status}"


def facts_of_primer(output, large_arrays="right up to"):
    lines = list(ring_lines(output))
    sizes = re.findall(r"^ +(\d+)  ", output, re.M)  # a line of times for each that is right
    values = [line for line in lines if "sent" not in line]
    return {
        "values": [*values, f"arrays of all sizes: {large_arrays} {sizes[-1] if sizes else 0} bytes"],
        "elements send": [float(line.split()[-1]) for line in lines if "sent" in line],
    }


def ring_lines(output):
    """Of the primer's output the ring's results and traffic. After the first half only part r of rank r
    counts."""
    part = ""
    for line in output.splitlines():
        if not line.startswith("  "):
            part = line.split(",")[1].split()[0] if line.startswith("ring,") else ""  # "first" or "both"
        found = re.match(r"  rank (\d+)  .*->  \[(.*)\]", line)
        if part and found:
            rank, parts = int(found.group(1)), found.group(2).split(", ")
            result = parts[rank : rank + 1] if part == "first" else parts
            yield f"{part} half{'s' * (part == 'both')}, rank {rank}: {', '.join(result)}"
        elif part and line.startswith("  sent"):
            yield f"{part} half{'s' * (part == 'both')}, {line.strip()}"


def text_of(path, size=FILE_BYTES):
    """Of a regular file, so much at most. A run, or who hands in, may have left something else there: a link,
    a folder, or a pipe that nobody writes."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), errors="replace") as file:
        return file.read(size) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else ""


def facts_of_log(path):
    facts = {"loss": [], "grad_norm": [], "lr": [], "seconds": []}
    seconds, computes = [], []  # of each step: all of it, and what compute has to do in it
    try:
        lines = [json.loads(line) for line in text_of(path).splitlines()]
        for line in lines:
            if "step" in line:
                for name in ("loss", "grad_norm", "lr"):
                    facts[name].append(
                        math.nan if line[name] is None else line[name]
                    )  # JSON has neither NaN nor infinity
                seconds.append(line["modelled"]["seconds"])
                computes.append(line["modelled"]["compute_seconds"])
        summary = lines[-1]["summary"]
        facts["seconds"], facts["compute"] = [sum(seconds)], [sum(computes)]
        facts["step"], facts["hidden"] = [summary["modelled"]["seconds"]], [summary["modelled"]["hidden"]]
        for rank in summary["memory"]:
            for purpose, size in rank["measured"].items():
                facts.setdefault("memory " + purpose, []).append(size)
        for number, rank in enumerate(summary["communication"]):
            for operation, count in rank.items():
                if operation != "rank":
                    for what in ("elements", "calls"):
                        of_ranks = facts.setdefault(f"{what} {operation}", [0] * summary["ranks"])
                        of_ranks[number] = count[what]
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError):
        return {}
    for name, values in facts.items():
        if name.startswith(("memory", "elements", "calls")) and len(set(values)) == 1:
            facts[name] = values[:1]  # all ranks have the same
    return facts


# ---- Probes


def hints_of(machine, stage, numbers):
    """{number: what the probe of this exercise (probes/NN.cu) says of the machine's tree}: a sentence, or
    nothing."""
    program = f"homework_tests-{stage.number}"
    try:
        build(machine, {program})
    except BuildError as error:
        return {number: f"does not compile: {error}" for number in numbers}
    ranks = re.search(r"^// ranks: (\d+)$", (HERE / f"probes/{stage.number}.cu").read_text(), re.M)[1]
    command = ["mpirun", "-n", ranks, str(machine.tree / folder_of() / program)]
    with tempfile.TemporaryDirectory(dir=machine.tree / "build") as folder:
        machine.own(folder)
        learner = bool(read_note(machine.tree))

        def ask(number):
            sign = str(secrets.randbelow(10**12))
            extra = {"TEST_NUMBER": sign}
            status, output = machine.call([*command, f"[{number}]"], folder, PROBE_SECONDS, extra)
            return hint_in(status, output, sign, learner)

        hints = {}
        for number in numbers:
            hint = ask(number)
            hint = ask(number) if hint.endswith("it hangs") else hint  # or it was slow
            hints[number] = hint or host_waits(bodies_of(machine.tree, stage.exercises[number]))
        return hints


def host_waits(bodies):
    """A probe sees the order on the device, not that the host waits for it."""
    for body in bodies:
        for token, _ in tokens(body):
            if re.fullmatch(r"cuda(\w*Synchronize|Memcpy|Malloc\w*)", token):
                return f"{token}(): the host waits for the device, and launches nothing meanwhile; streams wait for events"
    return ""


def hint_in(status, output, sign, learner=False):
    if status == 0 and re.search(rf"^{sign}\n[1-9]\d* passed, 0 failed$", output, re.M):
        return ""
    if found := re.search(r"^hint: (.*)$", output, re.M):
        return found[1]
    if learner and "doing: right alone\n" in output and re.search(r"\d\d\.\d is not written yet", output):
        return ""  # it can't do more
    doing = re.findall(r"^doing: (.*)$", output, re.M)
    error = re.search(
        r"((?:a send and its receive|the ranks of a collective) differ: .*?)(?:\. The last operations.*| \(\S*:\d+\))?$|"
        r"^rank \d+: (.* failed: .*?)(?: \(\S*:\d+\))?$|(\d\d\.\d is not written yet)",
        output,
        re.M,
    )
    hangs = status == 124 or "time limit exceeded" in output
    end = "it crashes" if status else "it ends the process"
    end = next(filter(None, error.groups())) if error else "it hangs" if hangs else end
    end = re.sub(r"^(\w+)\(.*\) failed", r"\1() failed", end)
    return f"{doing[-1].strip() if doing else 'at its start'}: {end}"


# ---- Races


def races_in(output):
    """ThreadSanitizer's reports, in words: who writes or reads what the other one does."""
    found = []
    for report in output.split("WARNING: ThreadSanitizer: data race")[1:]:
        sides = re.findall(
            r"^  (?:Previous )?(?:atomic )?([Ww]rite|[Rr]ead) of size[^\n]*\n((?:    #[^\n]*\n)+)",
            report,
            re.M,
        )
        words = [(kind.lower(), operation_of(kind.lower(), stack)) for kind, stack in sides[:2]]
        words.sort(key=lambda side: side[0] != "write")
        if len(words) == 2:
            verb = "writes" if words[1][0] == "write" else "reads"
            found.append(f"{words[0][1]} writes what {words[1][1]} {verb}")
        elif words:
            found.append(f"{words[0][1]} {words[0][0]}s what another stream uses")
    return sorted(set(found))


def operation_of(kind, stack):
    for line in stack.splitlines():
        found = re.search(r"pentatron::(?:\(anonymous namespace\)::)?(\w+)_kernel", line)
        found = found or re.search(
            r"nccl_mpi::Engine::((?:all_\w+?|reduce_\w+?|broadcast))(?:_at_once|_in_parts)?\(", line
        )
        if found:
            return found.group(1)
        if "Engine::run_point_to_point" in line:
            return "receive" if kind == "write" else "send"
    if re.search(r"cublas|gemm", stack):
        return "a matrix product"
    if "Memcpy" in stack or "Memset" in stack:
        return "a copy"
    return "the host" if "main" in stack else "another operation"


# ---- Comparison


def same(a, b, tolerance=NUMBERS):
    if isinstance(a, str) or isinstance(b, str):  # a line
        return a == b
    return abs(a - b) <= tolerance * max(abs(a), abs(b), 1e-30)


def differences(seen, reference):
    """{name: what was seen}, of the facts that differ from the reference's. "end" if it did not end well, and
    its numbers do not say why."""
    result = {}
    for name in sorted(
        (set(seen.facts) | set(reference)) - {"step", "hidden"}
    ):  # they follow from the seconds of all steps
        here, there = seen.facts.get(name, [0]), reference.get(name, [0])
        if len(here) != len(there) or not all(same(a, b) for a, b in zip(here, there)):
            result[name] = here
    if seen.end != "ok" and not (seen.facts and set(result) & set(PARITY)):
        return {"end": [re.sub(r"\d+", "N", seen.end)]}
    return result


def is_right(differs):
    """The same numbers as one rank."""
    return not any(name in PARITY or name == "end" for name in differs)


def costs_right(differs, seen, reference):
    """The same traffic and memory, and no more time, than the reference needs. The number of calls shows in
    time."""
    if not is_right(differs) or any(name.startswith(("memory", "elements")) for name in differs):
        return False
    return "seconds" not in differs or seen.facts["seconds"][0] <= reference["seconds"][0] * 1.0001


def ratio(a, b):
    if not math.isfinite(a):
        return "not a number"
    digits = 4 if abs(a - b) > 1e-3 * abs(b) else 10
    return f"{a / b:.{digits}g} of what it should be" if b else f"{a:g} in place of 0"


NAMES = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate"}


def in_words(differs, seen, reference):
    """The first difference, in words."""
    if "end" in differs:
        return seen.end
    if "values" in differs:
        for here, there in zip(seen.facts.get("values", []), reference["values"]):
            if here != there:
                return f"{here}, and should be {there.split(': ')[-1]}"
        return "lines are missing"
    for step in range(len(reference.get("loss", []))):
        for name in (
            name for name in ("lr", "loss", "grad_norm") if name in differs and step < len(differs[name])
        ):
            here, there = differs[name][step], reference[name][step]
            if not same(here, there):
                right = " (its loss is right)" if name == "grad_norm" else ""
                right = right or " (all before it is right: the weights are not)" * (
                    step > 0 and name == "loss"
                )
                return f"step {step + 1}: the {NAMES[name]} is {ratio(here, there)}{right}"
    for name, here in sorted(
        differs.items(), key=lambda fact: not fact[0].startswith("memory")
    ):  # what a rank has comes first
        there = reference.get(name, [0])
        kind, _, of = name.partition(" ")
        if kind in ("memory", "elements"):
            ranks = max(len(here), len(there))  # a list of one holds for all ranks
            rank = next(r for r in range(ranks) if here[r % len(here)] != there[r % len(there)])
            sizes = f"{int(here[rank % len(here)]):,} in place of {int(there[rank % len(there)]):,}"
            return f"the numbers are right, but {'a rank' if 'values' in reference else f'rank {rank}'} " + (
                f"has {sizes} bytes of {of}" if kind == "memory" else f"sends {sizes} elements by {of}"
            )
    if "seconds" in differs:
        longer, hidden, compute = (
            [facts[name][0] for facts in (seen.facts, reference)] for name in ("seconds", "hidden", "compute")
        )
        words = f"the numbers are right, but the modelled time is {ratio(*longer)}"
        if hidden[0] != hidden[1]:
            words += f"; compute hides {100 * hidden[0]:.0f} % of communication, and should hide {100 * hidden[1]:.0f} %"
        for name in differs:
            if name.startswith("calls"):
                calls = [int(facts.get(name, [0])[0]) for facts in (seen.facts, reference)]
                words += f"; rank 0 has {calls[0]} calls of {name[6:]} in place of {calls[1]}"
        if "compute" in differs and compute[0] > compute[1]:
            return f"{words}; compute has more to do: what its stream runs takes {ratio(*compute)}"
        return (
            words
            + "; compute has the same to do, and waits too early or for too much, or the host waits"
            * (list(differs) == ["seconds"])
        )
    return "right" if is_right(differs) else "steps are missing"
