"""Rations: what instances of all models share, such as a device's memory, and which of those that wait goes next.

Triton's rate limiter. An instance's group says what it needs while it runs (`rate_limiter` in `config.pbtxt`): so much
of a resource, of which there is one pool for each device, or one for all (`global`). A pool has as much as the option
`--rate-limit-resource` says, or else what the neediest instance needs, so that those run one after the other.

How it works, all of it synchronous and without a clock:

- An instance that is to run makes a *claim*. It is met if all that it needs is there and no claim that goes before it
  waits for any of that. Otherwise it waits, and what it needs is kept for it: a small claim never overtakes a big one
  on the pool that both need, or else the big one would starve. Claims on other pools are not held up.
- Of those that wait the one with the lowest *share* goes first: executions times priority, as in Triton, so that an
  instance of priority 2 runs half as often as one of priority 1 while both always have something to do. One that was
  idle for long, or has just been loaded, saves nothing up: it starts at the share of the last one that was served.
  (Triton counts from 0, so a model that is loaded late holds up all others until its instances have caught up.)
- A claim is the instance's, not a request's. The queue whose line is empty, as its clients have left, withdraws it.
- What an instance has is given back when the work has really ended; an abandoned run keeps it till then.

Rejected: an instance with several resources taking them one by one, which deadlocks; and letting small claims fill the
gaps in front of a big one for a bounded number of times, which needs a bound that nobody can choose.

What it doesn't do: it doesn't see that a model asks another one (BLS). If both need the same pool, and it is too small
for both, the second waits for the first, which waits for the second, until the client leaves or is out of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from trio_infer.errors import ModelLoadError, SetupError
from trio_infer.protocol.queueing import Needs, Pool

__all__ = ["Claims", "Resources"]


@attrs.define(eq=False)
class _Claim:
    """What one instance needs while it runs."""

    needs: Mapping[Pool, int]
    priority: int
    wake: Callable[[], None]
    """Whoever makes it, when it waits and can be met."""
    share: int = 0
    since: int = 0


class Resources:
    """The pools of one server.

    Args:
        rules: `NAME:COUNT` or `NAME:COUNT:DEVICE`, each for the size of a pool.

    Raises:
        SetupError: one can't be read.
    """

    def __init__(self, rules: Iterable[str] = ()) -> None:
        self._sizes: dict[Pool, int] = dict(_parsed(rule) for rule in rules)
        self._claims: set[_Claim] = set()
        self._held: dict[Pool, int] = {}
        self._waiting: set[_Claim] = set()
        self._served = 0
        """The share of the last one that was served."""
        self._arrivals = 0
        self._stirred = self._offering = False

    def register(self, model: str, needs: Sequence[Needs]) -> Claims | None:
        """A model's instances have come.

        Args:
            model: its name.
            needs: of each of its instances.

        Returns:
            their claims; None if they need nothing.

        Raises:
            ModelLoadError: one can never run, or a resource would be global and each device's own at once.
        """
        kinds = {pool[0]: pool[1] is None for claim in self._claims for pool in claim.needs}
        for need in needs:
            for (name, device), count in need.pools.items():
                if kinds.setdefault(name, device is None) is not (device is None):
                    reason = (
                        f'Resource "{name}" is present as both global and device-specific resource in the model '
                        "configuration; make it `global` in all models' instance groups, or in none"
                    )
                    raise ModelLoadError(model, reason)
                size = self._given_size((name, device))
                if size is not None and count > size:
                    reason = (
                        f'Resource count for "{name}" is limited to {size} which will prevent scheduling of one or '
                        f"more model instances, the minimum required count is {count}; raise --rate-limit-resource, "
                        "or lower the `count` in the instance group"
                    )
                    raise ModelLoadError(model, reason)
        if not any(need.pools for need in needs):
            return None
        claims = {index: _Claim(need.pools, need.priority, _nobody) for index, need in enumerate(needs)}
        self._claims.update(claims.values())
        self.offer()  # pools may have grown
        return Claims(self, claims)

    def size(self, pool: Pool) -> int:
        """How much there is of it, free or not."""
        given = self._given_size(pool)
        return given if given is not None else max((claim.needs.get(pool, 0) for claim in self._claims), default=0)

    def held(self, pool: Pool) -> int:
        """How much of it instances have, now."""
        return self._held.get(pool, 0)

    def _given_size(self, pool: Pool) -> int | None:
        return self._sizes.get(pool, self._sizes.get((pool[0], None)))

    # -- For `Claims` -----------------------------------------------------------------------------------------------

    def take(self, claim: _Claim) -> bool:
        """Meet a claim if that is possible now; else it waits."""
        fresh = claim not in self._waiting
        if fresh:
            self._arrivals += 1
            claim.share, claim.since = max(claim.share, self._served), self._arrivals
            self._waiting.add(claim)
        if not any(claim is other for other in self._possible()):
            return False
        self._waiting.discard(claim)
        for pool, count in claim.needs.items():
            self._held[pool] = self._held.get(pool, 0) + count
        self._served = max(self._served, claim.share)
        claim.share += claim.priority
        return True

    def give_back(self, claim: _Claim) -> None:
        """The instance runs no more."""
        for pool, count in claim.needs.items():
            self._held[pool] -= count
            if not self._held[pool]:
                del self._held[pool]

    def withdraw(self, claims: Iterable[_Claim]) -> None:
        """These don't wait any more."""
        before = len(self._waiting)
        self._waiting.difference_update(claims)
        if len(self._waiting) < before:
            self.offer()

    def remove(self, claims: Iterable[_Claim]) -> None:
        """These instances are no more; what they still have, they give back when their work has ended."""
        self._claims.difference_update(claims)
        self._waiting.difference_update(claims)
        self.offer()

    def _possible(self) -> list[_Claim]:
        """Those of the waiting claims that can be met, in their order."""
        free: dict[Pool, int] = {}
        possible = []
        for claim in sorted(self._waiting, key=lambda claim: (claim.share, claim.since)):
            for pool in claim.needs:
                if pool not in free:
                    free[pool] = self.size(pool) - self._held.get(pool, 0)
            if all(count <= free[pool] for pool, count in claim.needs.items()):
                possible.append(claim)
            for pool, count in claim.needs.items():
                free[pool] -= count  # also if it can't be met: then it is kept
        return possible

    def offer(self) -> None:
        """Wake those who can go on. Each takes what is offered, or withdraws, or is at it already and does so then."""
        self._stirred = True
        if self._offering:
            return
        self._offering = True
        try:
            asked: set[_Claim] = set()
            while self._stirred:
                self._stirred = False
                for claim in self._possible():
                    if claim not in asked:
                        asked.add(claim)
                        claim.wake()
                        if claim not in self._waiting:
                            asked.clear()
                        self._stirred = True
                        break
        finally:
            self._offering = False


class Claims:
    """The claims of some of a model's instances: those that one queue grants.

    Args:
        resources: the server's.
        claims: by the instances' indices.
    """

    def __init__(self, resources: Resources, claims: Mapping[int, _Claim]) -> None:
        self._resources = resources
        self._claims = claims

    def part(self, first: int, count: int) -> Claims:
        """Those of certain instances, for a queue of their own."""
        return Claims(self._resources, {index: self._claims[index] for index in range(first, first + count)})

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this when a claim that waits can be met: it must `take`, or `withdraw`."""
        for claim in self._claims.values():
            claim.wake = listener

    def take(self, free: Iterable[int]) -> int | None:
        """Meet the claim of one of these instances; all of them wait if none can be met.

        Args:
            free: their indices.

        Returns:
            which one; None for none.
        """
        for index in sorted(free, key=lambda index: self._claims[index].share):
            claim = self._claims[index]
            if not claim.needs or self._resources.take(claim):
                return index
        return None

    def give_back(self, index: int) -> None:
        """The work in this instance has ended. Call `offer` when it has had its own turn to claim again."""
        self._resources.give_back(self._claims[index])

    def offer(self) -> None:
        """Let others have what there is."""
        self._resources.offer()

    def withdraw(self) -> None:
        """Nobody waits for these instances now."""
        self._resources.withdraw(self._claims.values())

    def close(self) -> None:
        """The instances are no more."""
        self._resources.remove(self._claims.values())


def _nobody() -> None:
    """Wakes none: nobody has made this claim yet."""


def _parsed(rule: str) -> tuple[Pool, int]:
    name, _, rest = rule.partition(":")
    count, _, device = rest.partition(":")
    if not name or not count.isdecimal() or (device and not device.isdecimal()) or rest.endswith(":"):
        raise SetupError(
            f"--rate-limit-resource must be NAME:COUNT or NAME:COUNT:DEVICE with whole numbers, got '{rule}'"
        )
    return (name, int(device) if device else None), int(count)
