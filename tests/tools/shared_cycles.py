#!/usr/bin/env python3
"""shared_cycles.py OBJECT...: how often the loops of kernels read and write shared memory for an mma.

Shared memory moves 128 bytes a cycle: an ldmatrix of four matrices takes four cycles, an access of 4 bytes a
lane one, of 16 bytes four. For each loop with mma of each kernel in the objects: the mma, these cycles, local
memory (spills), and cycles per mma; of the loop itself, without the loops in it. Where warps take different
branches, all are counted. It reads the machine code, by cuobjdump."""

import re
import shutil
import subprocess
import sys


def cycles(instruction):
    if not re.match(r"LDSM|LDS|STS|LDGSTS", instruction):
        return 0
    if instruction.startswith("LDSM"):
        return int((re.search(r"\.([124])$", instruction) or "01")[1])
    return 4 if ".128" in instruction else 2 if ".64" in instruction else 1


def report(kernel, code):
    loops = {}  # first address: last address
    for address, instruction, target in code:
        if instruction == "BRA" and target is not None and target < address:
            loops[target] = max(loops.get(target, 0), address)
    for first, last in sorted(loops.items()):
        inner = [l for l in loops.items() if first <= l[0] and l[1] <= last and l != (first, last)]
        own = [i for a, i, _ in code if first <= a <= last and not any(b <= a <= e for b, e in inner)]
        mma = sum(i.startswith("HMMA") for i in own)
        if mma:
            moved, local = sum(map(cycles, own)), sum(i[:3] in ("LDL", "STL") for i in own)
            print(f"{kernel:48} {mma:6} {moved:8} {local:6} {moved / mma:14.2f}")


if shutil.which("cuobjdump") is None:
    print("shared_cycles.py: skipped, no cuobjdump here")
    sys.exit(0)
print(f"{'kernel':48} {'mma':>6} {'cycles':>8} {'local':>6} {'cycles per mma':>14}")
for path in sys.argv[1:]:
    text = subprocess.run(["cuobjdump", "-sass", path], capture_output=True, text=True, check=True).stdout
    for function in text.split("Function : ")[1:]:
        name = subprocess.run(["c++filt", function.split()[0]], capture_output=True, text=True).stdout
        lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ +)?(\S+?)(?:;| ([^;]*);)", function)
        targets = [re.search(r"0x([0-9a-f]+)", operands) for _, _, operands in lines]
        code = [(int(a, 16), i, int(t[1], 16) if t else None) for (a, i, _), t in zip(lines, targets)]
        report(name.split("(")[0].replace("void ", "").replace("pentatron::", ""), code)
