"""Writes tests/golden/fp8.txt: the numbers of 8 bits, and what other numbers are rounded to, by the package ml_dtypes.

    python3 tests/make_fp8_table.py         needs NumPy and ml_dtypes

A line is a format (e4m3 or e5m2), the bits of a float, and a code. First come the 256 codes, each with the float that it
means; then floats with the code that they are rounded to: each number in the middle of two neighbours, the floats next
to it, and random ones. What is too large becomes infinity there, or not a number.
"""

import pathlib

import ml_dtypes
import numpy as np

FORMATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}

with open(pathlib.Path(__file__).parent / "golden" / "fp8.txt", "w") as out:
    for name, kind in FORMATS.items():
        codes = np.arange(256, dtype=np.uint8)
        values = codes.view(kind).astype(np.float32)
        for bits, code in zip(values.view(np.uint32), codes):
            out.write(f"{name} {bits:08x} {code:02x}\n")
        finite = np.sort(values[np.isfinite(values)])
        middles = (finite[1:] + finite[:-1]) / 2
        beyond = np.float32([464, 480, 1e30, np.inf, -np.inf, np.nan, 61440, 65536, 2**-10, 2**-17, 2**-18, 1e-30])
        scattered = np.random.default_rng(1).normal(size=300).astype(np.float32) ** 5 * 30
        inputs = np.concatenate(
            [
                middles,
                np.nextafter(middles, np.float32(np.inf)),
                np.nextafter(middles, np.float32(-np.inf)),
                beyond,
                np.nextafter(beyond, np.float32(0)),
                np.nextafter(beyond, np.float32(np.inf)),
                scattered,
            ]
        )
        inputs = inputs.astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = inputs.astype(kind)
        for bits, code in zip(inputs.view(np.uint32), rounded.view(np.uint8)):
            out.write(f"{name} {bits:08x} {code:02x}\n")
