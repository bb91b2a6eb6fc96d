"""Each instance of a Triton Python model in a process of its own, as in Triton.

Why: module globals belong to one instance; several instances compute at once, since each has a GIL of its own; a crash
(a segmentation fault, `os._exit`, the kernel's OOM killer) costs the requests that were in that process, and the
server goes on; and a process can be killed, so that there is no model that can't be stopped.

    server                                                  worker (one an instance)
    runner ── slot ── process ══ run socket ═══════════════ child: main thread, calls execute
                 │        │   ══ control socket ═══════════ child: control thread
              in_hand     │
                 │        └────  memory  ────────────────── jobs, remote_bridge: any thread of the model's
               calls             (tensors, cancel flags)

- `codec`: the messages; `memory`: shared memory; both sides use them, and neither imports trio.
- server: `process` starts, feeds and reaps one process; `slot` keeps one instance alive through any number of them;
  `in_hand` are its requests and `works` is one; `calls` does what models ask of the server; `runner` is the model.
- worker: `child` is the process; `jobs` is one request; `remote_bridge` asks the server; `code` imports the model.

What is told to the worker goes by two sockets, because its main thread must read requests itself (a thread between
would cost a switch) and can't read anything while it is in `execute`. All that it says comes back by one, so that it
arrives in order: a line that a model logged before its response is in the log before the response is sent.

Cancelling. When a request's task leaves, its number is written into its flag, in shared memory, in the same instant;
`is_cancelled()` in the worker is a comparison. A message follows for who must be woken: a sender that waits for room, a
coroutine that is to be cancelled. If the model hears nothing of that, `cancel_grace_ms` says when its process is
killed.

No orphans. The kernel kills a worker when the server's thread that started it dies (`PR_SET_PDEATHSIG`); where there is
no such thing, and for good measure, a worker exits when a socket to the server closes.

Measured (2 cores, Linux 6; medians of `bench/process.py`): see `docs/processes.md`.

Rejected: `multiprocessing` (pickle, a resource tracker that unlinks the server's memory, 15 times slower for a 16 MiB
tensor); `fork` (the server has threads); one shared pool of workers (model globals are per instance, and weights would
have to be in each).
"""
