"""Writes tests/golden/fp8.txt: the numbers of e4m3, and what other numbers are rounded to, by the package
ml_dtypes.

    python3 tests/make_fp8_table.py         needs NumPy and ml_dtypes

A line is a code, the number that it means, and the largest float that is rounded to it. Negative numbers have
the same codes with the first bit set. What is larger than the last of these floats is not a number."""

import pathlib

import ml_dtypes
import numpy as np


def rounded(bits):
    """The code of the float with these bits."""
    with np.errstate(over="ignore", invalid="ignore"):
        positive, negative = (
            (np.uint32([bits, bits | 1 << 31]).view(np.float32))
            .astype(ml_dtypes.float8_e4m3fn)
            .view(np.uint8)
        )
    assert negative == positive | 0x80
    return positive


with open(pathlib.Path(__file__).parent / "golden" / "fp8.txt", "w") as out:
    for code in range(0x7F):
        value = np.uint8([code]).view(ml_dtypes.float8_e4m3fn).astype(np.float32)[0]
        last, beyond = int(value.view(np.uint32)), int(np.float32(np.inf).view(np.uint32))
        while beyond - last > 1:
            middle = (last + beyond) // 2
            if rounded(middle) <= code:
                last = middle
            else:
                beyond = middle
        out.write(f"{code:02x} {value:.9g} {np.uint32(last).view(np.float32):.9g}\n")
