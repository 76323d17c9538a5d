"""Questions on paper, with numbers drawn from an ID. They are answered in answers-NN.txt before the program
is run; then its number stands beside the learner's."""

import random
import re

from observe import Machine, build, observe
from sources import ROOT, Run, UsageError, check_id

POINTS = 3  # a question; there are five


def text_of(stage, identity):
    lines = [
        f"# Stage {stage.number}, ID {identity}. Write each number behind its =. The build is fp64: weights,",
        "# activations and gradients have 8 bytes each. Then: make paper-" + f"{stage.number} ID={identity}",
        "",
    ]
    for number, (text, _, _) in enumerate(questions(stage, identity), 1):
        lines += [f"{number}. {text}", f"{number} = ", ""]
    return "\n".join(lines)


def read_answers(text):
    """(ID, {number: answer}); a text that is no such file raises UsageError."""
    found = re.search(r"^# Stage \d\d, ID (.*?)\. Write", text, re.M)
    if not found:
        raise UsageError("answers: the first line, with stage and ID, is missing")
    answers = {}
    for number, value in re.findall(r"^(\d) =[ \t]*(.*)$", text, re.M):
        value = value.strip().replace(",", "").replace("_", "").rstrip("%")
        try:
            answers[int(number)] = float(value)
        except ValueError:
            if value:
                raise UsageError(f"answers: {number} = {value[:40]!r} is not a number") from None
    return found.group(1), answers


def answer(machine, stage, question):
    """The program's number: a dry run's, so it takes no time and no data."""
    _, runs, value = question
    facts = []
    for ranks, options in runs:
        show = "--show-" in options
        run = Run(
            "",
            ranks,
            (options + " --steps 1" * (not show) + " --dry-run" * (not show)).split(),
            stage.program,
            [],
        )
        seen = observe(machine, run)
        if seen.end != "ok":
            return None
        facts.append(seen.facts)
    return value(*facts)


def is_right(given, expected):
    return (
        given is not None
        and expected is not None
        and abs(given - expected) <= (0.5 if isinstance(expected, int) else 0.005 * abs(expected))
    )


def judge(machine, stage, identity, answers, say):
    """Points; says each question's two numbers."""
    build(machine, {stage.program})
    right = 0
    for number, question in enumerate(questions(stage, identity), 1):
        expected, given = answer(machine, stage, question), answers.get(number)
        good = is_right(given, expected)
        right += good
        say(f"  {number}. {question[0]}")
        say(
            f"     you {'-' if given is None else f'{given:,.10g}'}, the program "
            f"{'does not run' if expected is None else f'{expected:,.10g}'}: {POINTS if good else 0}/{POINTS}"
        )
    return right * POINTS


def paper(stage, identity, say=print):
    path = ROOT / f"answers-{stage.number}.txt"
    if not path.exists():
        path.write_text(text_of(stage, check_id(identity)))
        say(f"answers-{stage.number}.txt has five questions. Answer them, then call this again.")
        return None
    of, answers = read_answers(path.read_text())
    if identity and of != identity:
        raise UsageError(f"ID: {identity!r} is not valid; expected {of!r}, as in answers-{stage.number}.txt")
    missing = [str(n) for n in range(1, 6) if n not in answers]
    if missing:
        raise UsageError(f"answers-{stage.number}.txt: no answer yet to {', '.join(missing)}")
    points = judge(Machine(ROOT), stage, of, answers, say)
    say(f"paper {points}/{5 * POINTS}")
    return points


# ---- The questions: (text, [(ranks, options)], number of their facts)


def fact(name, rank=0):
    """A fact of one rank. A list of one holds for all ranks."""
    return lambda *facts: int((facts[0].get(name) or [0])[rank if len(facts[0].get(name, [])) > 1 else 0])


def questions(stage, identity):
    r = random.Random(f"paper {stage.number} {identity}")
    layers, heads, vocab, s = r.choice([2, 4, 6]), 4, r.choice([320, 480, 512]), r.choice([32, 48, 64])
    d, f = 16 * r.randint(2, 6), 24 * r.randint(2, 8)
    b = r.choice([1, 2, 3])
    n, m, other = r.choice([2, 4]), r.randint(2, 4), r.choice([3, 5, 6])
    sizes = (
        f"--layers {layers} --d-model {d} --heads {heads} --kv-heads {heads} --d-ff {f} --vocab-size {vocab} "
        f"--seq-len {s} --micro-batch-size {b}"
    )
    model = f"{layers} layers of width {d}, {heads} heads, an MLP of {f}, {vocab} tokens in the vocabulary"
    batch = f"sequences of {s} tokens, {b} a micro-batch"

    def of(ranks, micro_batches, options="", size=sizes, data_ranks=1):
        return ranks, f"{size} --global-batch-size {b * micro_batches * data_ranks} {options}"

    if stage.number == "01":
        return [
            (f"{model}: bytes of all weights", [of(1, 1)], fact("memory weights")),
            (
                "The same model: bytes of AdamW's two moments",
                [of(1, 1), of(1, 1, "--optimizer sgd")],
                lambda x, y: int(x["memory optimizer"][0] - y["memory optimizer"][0]),
            ),
            (f"Bytes of gradients, accumulated over {m} micro-batches", [of(1, m)], fact("memory gradients")),
            (
                f"{batch}: by how many bytes do activations shrink if backward computes attention's scores again "
                "(--recompute selective)",
                [of(1, 1), of(1, 1, "--recompute selective")],
                lambda x, y: int(x["memory activations"][0] - y["memory activations"][0]),
            ),
            (
                f"The learning rate of the first step, with --lr 0.1 and --warmup-steps {other}",
                [of(1, 1, f"--lr 0.1 --warmup-steps {other}")],
                lambda x: float(x["lr"][0]),
            ),
        ]
    if stage.number == "02":
        return [
            (
                f"{model}; {n} ranks, {m} micro-batches a rank: elements that go into all-reduces in a step, of one rank",
                [of(n, m, "--dp-sync naive", data_ranks=n)],
                fact("elements all_reduce"),
            ),
            (
                f"Bytes that a rank sends for them in a step, in a ring of {n}",
                [of(n, m, "--dp-sync naive", data_ranks=n)],
                lambda x: 8 * int(x["elements all_reduce"][0]) * 2 * (n - 1) // n,
            ),
            (
                "All-reduces in a step with --dp-sync overlap",
                [of(n, m, "--dp-sync overlap", data_ranks=n)],
                fact("calls all_reduce"),
            ),
            (
                f"All-reduces in a step with buckets of {other}0 kB (--bucket-mb 0.0{other})",
                [of(n, m, f"--dp-sync bucket --bucket-mb 0.0{other}", data_ranks=n)],
                fact("calls all_reduce"),
            ),
            (
                f"Bytes of gradients of a rank, on {n} ranks",
                [of(n, m, data_ranks=n)],
                fact("memory gradients"),
            ),
        ]
    if stage.number == "03":
        return [
            (
                f"{model}; stage 1 on {n} ranks: elements of a rank's reduce-scatters in a step",
                [of(n, m, "--zero-stage 1", data_ranks=n)],
                fact("elements reduce_scatter"),
            ),
            (
                f"Stage 2, {n} ranks, {m} micro-batches a rank: the same",
                [of(n, m, "--zero-stage 2", data_ranks=n)],
                fact("elements reduce_scatter"),
            ),
            (
                f"Stage 3, {n} ranks, {m} micro-batches a rank: reduce-scatters in a step",
                [of(n, m, "--zero-stage 3", data_ranks=n)],
                fact("calls reduce_scatter"),
            ),
            (
                f"Stage 3, {n} ranks: bytes of weights of a rank, with two buffers of the largest unit",
                [of(n, m, "--zero-stage 3", data_ranks=n)],
                fact("memory weights"),
            ),
            (
                f"Stage 2, {n} ranks: bytes of gradients of a rank, with two buffers of the largest unit",
                [of(n, m, "--zero-stage 2", data_ranks=n)],
                fact("memory gradients"),
            ),
        ]
    if stage.number == "04":
        return [
            (
                f"{model}; {batch}; {n} tensor ranks: bytes of weights of a rank",
                [of(n, 1)],
                fact("memory weights"),
            ),
            ("The same: all-reduces in a step of one micro-batch", [of(n, 1)], fact("calls all_reduce")),
            (f"With {m} micro-batches a step", [of(n, m)], fact("calls all_reduce")),
            (
                "With --sequence-parallel and one micro-batch: reduce-scatters in a step",
                [of(n, 1, "--sequence-parallel")],
                fact("calls reduce_scatter"),
            ),
            (
                "The elements of one of these all-gathers' own parts, added over a step",
                [of(n, 1, "--sequence-parallel")],
                fact("elements all_gather"),
            ),
        ]
    if stage.number == "05":
        p, many = 2, 2 * m
        return [
            (
                f"{model}; {batch}; 1F1B on {p} ranks, {many} micro-batches: messages that rank 0 sends in a step",
                [of(p, many)],
                fact("calls send", 0),
            ),
            ("Elements that they hold", [of(p, many)], fact("elements send", 0)),
            (
                "The same with --pp-schedule interleaved --vpp 2 (all layers are divided evenly)",
                [
                    of(
                        p,
                        many,
                        "--pp-schedule interleaved --vpp 2",
                        sizes.replace(f"--layers {layers}", "--layers 8"),
                    )
                ],
                fact("elements send", 0),
            ),
            (
                "Bytes by which activations of rank 0 grow if all forward come before all backward (afab)",
                [of(p, many, "--pp-schedule afab"), of(p, many)],
                lambda x, y: int(x["memory activations"][0] - y["memory activations"][0]),
            ),
            (
                f"1F1B on {layers} ranks, {many} micro-batches, every forward takes 1 and every backward 2: how long a step takes",
                [(1, f"{sizes} --global-batch-size {b * many} --pp {layers} --show-schedule")],
                lambda x: int(re.search(r"Time (\d+)", x["picture"][0]).group(1)),
            ),
        ]
    if stage.number == "06":
        c = n
        return [
            (
                f"{model}; {batch}; a ring of {c}: messages that a rank sends in a step of one micro-batch",
                [of(c, 1)],
                fact("calls send"),
            ),
            ("Elements that they hold", [of(c, 1)], fact("elements send")),
            (f"With {m} micro-batches", [of(c, m)], fact("elements send")),
            (
                "With --cp-exchange all-gather and one micro-batch: elements of a rank's own parts in all all-gathers",
                [of(c, 1, "--cp-exchange all-gather")],
                fact("elements all_gather"),
            ),
            (
                "Bytes by which its buffers for communication are larger than those of the ring",
                [of(c, 1, "--cp-exchange all-gather"), of(c, 1)],
                lambda x, y: int(x["memory communication"][0] - y["memory communication"][0]),
            ),
        ]
    experts = 4 * r.choice([1, 2])
    rank = r.randint(0, 15)
    tp, cp, pp = 2, r.choice([1, 2]), r.choice([1, 2, 4])
    dp = 16 // (tp * cp * pp)
    even, mesh = f"--experts {experts} --ep 2", [(1, f"--tp {tp} --cp {cp} --dp {dp} --pp {pp} --show-mesh")]
    stages, stage_of_zero = r.choice([2, 4]), r.choice([1, 2])
    pipeline = f"{sizes.replace(f'--layers {layers}', '--layers 8')} --global-batch-size {b * stages * m} --pp {stages}"

    def time_of(schedule):
        return lambda x: float(next(row.split()[1] for row in x["picture"] if row.startswith(schedule + " ")))

    return r.sample(
        [
            (
                f"16 ranks, tp {tp}, cp {cp}, dp {dp}, pp {pp}: the place of rank {rank} on the data axis",
                mesh,
                lambda x: int(x["picture"][4 + rank].split()[3]),
            ),
            (
                f"16 ranks, tp {tp}, cp {cp}, dp {dp}, pp {pp}: how many ranks sum the gradient of a dense weight of rank {rank} "
                "(with itself)",
                mesh,
                lambda x: sum(
                    row.split()[1:5:3] == x["picture"][4 + rank].split()[1:5:3] for row in x["picture"][4:20]
                ),
            ),
            (
                f"{model}; {experts} experts in every layer, --ep 2, 2 ranks: bytes of weights of a rank",
                [of(2, 1, even, data_ranks=2)],
                fact("memory weights"),
            ),
            (
                f"{layers} layers; {batch}, top 2 of {experts} experts, even shares, 2 ranks: all-to-alls in a step of one "
                "micro-batch",
                [of(2, 1, even, data_ranks=2)],
                fact("calls all_to_all"),
            ),
            (
                f"{model}; --tp 2 --pp 2 on 4 ranks: bytes of weights of rank 0",
                [of(4, 2, "--tp 2 --pp 2")],
                fact("memory weights", 0),
            ),
            (
                f"{stages} pipeline ranks, {stages * m} micro-batches; all forward passes of a rank's layers take 1, backward 2: by "
                "how much a step is shorter with two chunks a rank (interleaved) than with 1F1B",
                [(1, f"{pipeline} --pp-schedule interleaved --vpp 2 --show-schedule")],
                lambda x: time_of("1f1b")(x) - time_of("interleaved")(x),
            ),
            (
                f"{model}; 2 pipeline and 2 data ranks, {m} micro-batches a rank, ZeRO-{stage_of_zero}: elements of rank 0's "
                "reduce-scatters in a step",
                [of(4, m, f"--pp 2 --zero-stage {stage_of_zero}", data_ranks=2)],
                fact("elements reduce_scatter", 0),
            ),
        ],
        5,
    )
