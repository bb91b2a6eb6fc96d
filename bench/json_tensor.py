"""A million numbers as JSON, in and out: how much faster than the way that comes to mind first.

That way is the standard library's `json` and Python lists: `numpy.array(json.loads(body)["inputs"][0]["data"])`, and
`json.dumps` of `array.tolist()`. Ours is what the server does with an infer request, all checks included:
`decode_request` and `encode_response`. Both run in this process, in turn, and CPU time is taken, of several rounds the
best, so that what else the machine does counts for little.

Where the time of ours goes, in: orjson makes a Python float of each number, which is two thirds of it; then one look at
the type of each and one conversion by numpy. A parser that fills an array without floats in between would save perhaps
half; numpy's own (`fromstring`) takes four times as long as all of this, and rounding correctly is nothing to be
improvised. Out: orjson writes straight from the array.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import numpy as np

from _harness import report, table, verdict
from trio_infer.limits import Limits
from trio_infer.protocol.infer import decode_request, encode_response
from trio_infer.protocol.values import InferResponse, Signature, TensorSpec

NUMBERS = 1_000_000
LIMITS = Limits()


def plain_in(body: bytes, datatype: str) -> np.ndarray:
    return np.array(json.loads(body)["inputs"][0]["data"], {"FP32": "f4", "FP64": "f8", "INT64": "i8"}[datatype])


def plain_out(array: np.ndarray, datatype: str) -> bytes:
    output = {"name": "x", "datatype": datatype, "shape": list(array.shape), "data": array.tolist()}
    return json.dumps({"model_name": "m", "model_version": "1", "outputs": [output]}).encode()


def best(rounds: int, *functions: Callable[[], object]) -> list[float]:
    """The best CPU time of each, in ms."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, taken in zip(functions, times, strict=True):
            start = time.process_time_ns()
            function()
            taken.append((time.process_time_ns() - start) / 1e6)
    return [min(taken) for taken in times]


def main(quick: bool) -> None:
    count, rounds = (10_000, 2) if quick else (NUMBERS, 5)
    rng = np.random.default_rng(1)
    arrays = {
        "FP32": rng.standard_normal(count).astype("f4"),
        "FP64": rng.standard_normal(count),
        "INT64": rng.integers(-(2**40), 2**40, count),
    }
    rows: list[list[object]] = []
    ratios = {}
    for datatype, array in arrays.items():
        signature = Signature("m", "1", (TensorSpec("x", datatype, [-1]),), (TensorSpec("x", datatype, [-1]),))
        tensor = {"name": "x", "datatype": datatype, "shape": [count], "data": array.tolist()}
        body = json.dumps({"inputs": [tensor]}).encode()
        request, plan = decode_request(body, None, signature, limits=LIMITS)
        response = InferResponse({"x": array})
        assert np.array_equal(request.inputs["x"], array)
        (text,) = encode_response(response, request, plan, signature).buffers
        assert np.array_equal(np.array(json.loads(bytes(text))["outputs"][0]["data"], array.dtype), array)
        there = best(
            rounds,
            lambda body=body, datatype=datatype: plain_in(body, datatype),
            lambda body=body, signature=signature: decode_request(body, None, signature, limits=LIMITS),
        )
        back = best(
            rounds,
            lambda array=array, datatype=datatype: plain_out(array, datatype),
            lambda response=response, request=request, plan=plan, signature=signature: encode_response(
                response, request, plan, signature
            ),
        )
        ratios[datatype] = (there[0] + back[0]) / (there[1] + back[1])
        rows.append(
            [datatype, len(body) / 1e6, *there, there[0] / there[1], *back, back[0] / back[1], ratios[datatype]]
        )
    heads = [
        "numbers",
        "MB",
        "in: plain, ms",
        "ours, ms",
        "times",
        "out: plain, ms",
        "ours, ms",
        "times",
        "both, times",
    ]
    table(heads, rows)
    print(f"{count} numbers each way.")
    verdict("FP32, both ways, ours to plain", 1 / ratios["FP32"], 1 / 5, "(5 times as fast, or more)")


if __name__ == "__main__":
    with report(__doc__) as quick:
        main(quick)
