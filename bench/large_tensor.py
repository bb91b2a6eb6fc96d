"""A 16 MiB binary tensor in, out, and both ways, over one connection: how fast, how much CPU, how many copies.

Three models: `sink` takes the tensor and gives one number, `source` has the tensor ready and gives it, `echo` gives
back what it got. So *in* and *out* are each timed whole, from the request's first byte to the answer's last. The
client's own copying is in the time, and not in the CPU, which is the server's. MiB/s is payload in one direction.

The server's copies, counted from the kernel's socket buffer to the model and from the model to the kernel:

- in: one. `Connection._read_round` makes a bytearray as large as the body, and `recv_into` lets the kernel copy into
  it. (It is zeroed first, no copy but 16 MiB written: by fresh pages the first time, by calloc once malloc reuses
  them.) What came together with the head, 64 KiB at most, goes through h11 and is copied a few times more.
  `protocol.binary.bytes_to_array` makes a numpy view of it all (`np.frombuffer`).
- out: one. `to_buffer` takes a view of the model's array, h11 passes the `Data` event's buffer on untouched, `gather`
  leaves large buffers alone, and `send` lets the kernel copy from it.

That is not taken on trust. During one more `echo`, after the timing, the server traces its allocations: the peak, over
16 MiB, counts the large buffers in user space that exist together. And it looks at addresses: whether the array that
the model sees lies within the buffer that was given to `recv_into`, and whether the buffer given to `send` is the
model's array. If both hold, then each way is one copy, by the kernel; if one doesn't, there is at least one more, and
the count says so by the peak. Page faults (4 KiB each; 4,096 for 16 MiB) tell of fresh memory a request.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from _harness import BenchServer, connect, post, receive_answer, report, table, verdict

MIB = 2**20
LARGE = 16 * MIB


def infer(model: str, payload: bytes) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [len(payload) // 4]}
    document = {
        "inputs": [{**tensor, "parameters": {"binary_data_size": len(payload)}}],
        "outputs": [{"name": "x", "parameters": {"binary_data": True}}],
    }
    return post(model, "infer", document, payload)


def main(quick: bool) -> None:
    rounds = 3 if quick else 50
    payload = np.arange(LARGE // 4, dtype=np.float32).tobytes()
    answer = bytearray(LARGE + 65536)
    rows: list[list[object]] = []
    with BenchServer(models=["sink", "source", "echo"]) as server:
        sock = connect(server.port)
        for model, way in (("sink", "in"), ("source", "out"), ("echo", "both")):
            sent = payload[:4] if model == "source" else payload
            request = infer(model, sent)
            times, cpus, faults = [], [], []
            for _ in range(rounds + 1):
                faults.append(-server.ask("faults"))
                cpu, start = server.cpu_ns(), time.perf_counter_ns()
                sock.sendall(request)
                size = receive_answer(sock, answer)
                times.append((time.perf_counter_ns() - start) / 1e6)
                cpus.append((server.cpu_ns() - cpu) / 1e6)
                faults[-1] += server.ask("faults")
            if model != "sink":
                assert answer[size - LARGE : size] == payload, "it came back changed"
            ms = median(times[1:])  # without the first: it warms up
            rows.append([way, ms, 16 / ms * 1000, median(cpus[1:]), round(median(faults[1:]))])
        server.ask("watch copies")
        sock.sendall(infer("echo", payload))
        receive_answer(sock, answer)
        copies = server.ask("copies")
        sock.close()
    table(["way", "ms", "MiB/s", "server CPU ms", "page faults"], rows)
    buffers = copies["peak"] / LARGE
    more = max(1, round(buffers))
    print(f"Large buffers in user space at the peak: {buffers:.2f}")
    verdict("copies in", 1 if copies["received_in_place"] else 1 + more, 3, "(the kernel's is one)")
    verdict("copies out", 1 if copies["sent_in_place"] else 1 + more, 3, "(the kernel's is one)")


if __name__ == "__main__":
    with report(__doc__) as quick:
        main(quick)
