"""Takes requests of sequences through `sequences` and the queues of the instances that serve them.

Each instance has a queue of its own, of one instance: a request goes to the one that its sequence has a slot of, when
it is its turn there, and may be joined with requests of other sequences in that queue like any others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs
import numpy as np
import trio

from trio_infer.errors import InferError, Rescheduled
from trio_infer.lifecycle import Life, Phase
from trio_infer.models.model_files import read_inside
from trio_infer.protocol.binary import bytes_to_array
from trio_infer.protocol.sequencing import Sequencing, State, sequence_of
from trio_infer.protocol.values import Array, InferRequest, InferResponse, Send, Signature
from trio_infer.scheduling.sequences import Member, SequenceTable
from trio_infer.scheduling.ticket import InstanceQueue, QueueStatistics

__all__ = ["Sequencer"]

DIRECTORY: Final = "initial_state"
"""In the model's directory; where files of first states are, as with Triton."""

LARGEST: Final = 2**30

Run = Callable[[InstanceQueue, Life, InferRequest, Send], Awaitable[None]]


class Sequencer:
    """The sequences of one model.

    Args:
        sequencing: how they are served.
        signature: the model's.
        queues: one for each instance.
        run: waits in a queue, and runs.
        directory: the model's; None if it isn't in a repository.

    Raises:
        InferError: the file of a first state can't be read.
    """

    def __init__(
        self,
        sequencing: Sequencing,
        signature: Signature,
        queues: Sequence[InstanceQueue],
        run: Run,
        directory: Path | None = None,
    ) -> None:
        self._sequencing = sequencing
        self._signature = signature
        self._queues = queues
        self._run = run
        self._batched = signature.max_batch_size > 0
        self._table = SequenceTable(signature.name, len(queues), sequencing.slots, sequencing.idle)
        self._outputs = {state.output: state.input for state in sequencing.states}
        self._hidden = self._outputs.keys() - {spec.name for spec in signature.outputs}  # from clients
        self._first = sequencing.first_states(
            lambda state: _read(state, directory, signature.name), batched=self._batched
        )
        self._empty = trio.lowlevel.ParkingLot()
        self._members = 0

    def statistics(self) -> QueueStatistics:
        """How all queues stand together, now; who waits for a turn in its sequence waits, too."""
        each = [queue.statistics() for queue in self._queues]
        return QueueStatistics(
            len(each),
            sum(one.running for one in each),
            sum(one.waiting for one in each) + self._table.waiting,
            sum(one.abandoned for one in each),
            sum(one.entered for one in each) + self._table.waiting,
            sum(one.left for one in each),
        )

    async def settled(self) -> None:
        """Return when nobody is here and nothing runs.

        Cancellation: just stops waiting.
        """
        while self._members:
            await self._empty.park()
        for queue in self._queues:
            await queue.settled()

    async def infer(self, life: Life, request: InferRequest, send: Send) -> None:
        """Serve a request when its sequence has a slot and all before it in the sequence are done.

        Raises:
            InferError: it has no sequence, or no START where there must be one, or is of several rows.

        Cancellation: leaves at once, whatever it waits for, and ends its sequence.
        """
        if self._batched and life.rows != 1:
            raise InferError(
                f"inference request to model '{self._signature.name}' must specify batch-size 1 due to requirements of "
                f"sequence batcher, got {life.rows}"
            )
        key, start, end = sequence_of(request)
        if key not in (0, ""):  # that is the table's to refuse
            self._sequencing.inputs(key, start=start, end=end, batched=self._batched)
        member = self._table.enter(life, key, start=start, end=end)
        self._members += 1
        life.attach(member)
        try:
            if not member.turn:
                life.advance(Phase.QUEUED)
            while not member.turn:
                with trio.move_on_at(self._table.next_look()):
                    await member.news.wait()
                self._table.reap()
                if not member.turn:
                    member.news = trio.Event()
            while True:
                if life.cancelled:  # in the tick in which its turn came: it has no place any more
                    await trio.lowlevel.checkpoint()
                try:
                    await self._serve(member, life, request, send)
                    return
                except Rescheduled:
                    if not self._sequencing.iterative:
                        raise
                    member.start = False
                    await trio.lowlevel.checkpoint()
        except trio.Cancelled:  # also without a cancel of its life, as when another step of an ensemble has failed
            self._table.strike(member)
            raise
        finally:
            life.detach(member)
            self._table.leave(member)
            self._members -= 1
            if not self._members:
                self._empty.unpark_all()

    async def _serve(self, member: Member, life: Life, request: InferRequest, send: Send) -> None:
        sequence = member.sequence
        told = self._sequencing.inputs(sequence.key, start=member.start, end=member.end, batched=self._batched)
        states: Mapping[str, Array] = self._first if sequence.states is None else sequence.states
        wanted = request.requested_outputs
        full = attrs.evolve(
            request,
            inputs={**request.inputs, **told, **states},
            requested_outputs=tuple(dict.fromkeys((*wanted, *self._outputs))) if wanted else (),
        )

        async def keep(response: InferResponse) -> None:
            # Copies, as each may be a view of a whole batch's, which a sequence that pauses would keep.
            given = {name: np.array(array) for name, array in response.outputs.items() if name in self._outputs}
            if given:
                sequence.states = {**states, **{self._outputs[name]: array for name, array in given.items()}}
                rest = {name: array for name, array in response.outputs.items() if name not in self._hidden}
                response = attrs.evolve(response, outputs=rest)
            await send(response)

        await self._run(self._queues[member.instance], life, full, keep if self._outputs else send)


def _read(state: State, directory: Path | None, model: str) -> Array:
    if directory is None:
        raise InferError(f"the first value of state '{state.input}' is a file, but the model is not in a repository")
    rule = f"the file of state '{state.input}' must be in the model's directory '{DIRECTORY}'"
    content = read_inside(directory / DIRECTORY, state.file, most=LARGEST, rule=rule)
    return bytes_to_array(memoryview(content), state.datatype, state.shape, state.input, model=model, request_id="")
