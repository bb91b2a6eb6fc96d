"""Instances that share resources: who waits for them, in which order, and what comes back when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support import post, serving
from trio_infer import CancelReason, Life, ModelLoadError, ModelRepository, RateLimit, Server, SetupError
from trio_infer.models.runner import Attend, Instance
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.protocol.queueing import Batching, Needs, Pool
from trio_infer.protocol.values import InferRequest, Send
from trio_infer.scheduling.resources import Claims, Resources
from trio_infer.scheduling.ticket import InstanceQueue, Ticket

REQUEST = InferRequest("m", "1", {})


def needing(count: int, name: str = "R", device: int | None = 0, priority: int = 1) -> Needs:
    return Needs({(name, device): count}, priority)


def queue_of(resources: Resources, *needs: Needs) -> InstanceQueue:
    return InstanceQueue(len(needs), claims=resources.register("m", needs))


def test_a_pool_has_what_the_neediest_instance_needs_so_that_those_run_one_after_the_other() -> None:
    resources = Resources()
    big, small = queue_of(resources, needing(4)), queue_of(resources, needing(2), needing(2))
    first, second, third = big.draw(), small.draw(), small.draw()
    assert [ticket.instance is not None for ticket in (first, second, third)] == [True, False, False]
    assert small.statistics().waiting == 2
    big.give_up(first)
    assert [ticket.instance is not None for ticket in (second, third)] == [True, True], "both fit"
    assert resources.held(("R", 0)) == resources.size(("R", 0)) == 4


def test_pools_are_of_one_device_or_of_all() -> None:
    resources = Resources(["R:2", "R:1:1", "all:1"])
    assert [resources.size(pool) for pool in (("R", 0), ("R", 1), ("all", None))] == [2, 1, 1]
    queue = queue_of(resources, needing(1), needing(1), needing(1, device=1), needing(1, "all", None))
    assert all(queue.draw().instance is not None for _ in range(4))
    other = queue_of(resources, needing(1), needing(1, device=1), needing(1, "all", None))
    assert all(other.draw().instance is None for _ in range(3))


def test_instances_that_need_nothing_never_wait_for_resources() -> None:
    resources = Resources()
    assert resources.register("m", [Needs(), Needs(priority=3)]) is None
    queue = queue_of(resources, needing(1), Needs())
    held = queue_of(resources, needing(1)).draw()
    assert held.instance is not None
    ticket = queue.draw()
    assert ticket.instance is not None
    assert ticket.instance.index == 1


def test_one_that_is_cancelled_while_it_waits_for_resources_lets_others_have_them_in_that_instant() -> None:
    resources = Resources(["R:3"])
    holder, big, small = (queue_of(resources, needing(count)) for count in (1, 3, 2))
    running = holder.draw()
    life = Life()
    waiting, behind = big.draw(life), small.draw()
    assert running.instance is not None
    assert waiting.instance is None
    assert behind.instance is None, "what the big one needs is kept for it, or it would starve"
    life.cancel(CancelReason.DISCONNECTED)
    assert behind.instance is not None
    assert big.statistics().waiting == 0


def test_a_claim_on_another_pool_is_not_held_up() -> None:
    resources = Resources()
    one, two, other = (queue_of(resources, needing(1, name)) for name in ("R", "R", "S"))
    assert one.draw().instance is not None
    assert two.draw().instance is None
    assert other.draw().instance is not None


def test_an_abandoned_run_keeps_its_resources_until_its_work_has_really_ended() -> None:
    resources = Resources()
    deaf, other = queue_of(resources, needing(1)), queue_of(resources, needing(1))
    ticket, waiting = deaf.draw(), other.draw()
    instance = ticket.instance
    assert instance is not None
    instance.begin()
    deaf.give_up(ticket)
    assert deaf.statistics().abandoned == 1
    assert waiting.instance is None
    instance.end()
    assert waiting.instance is not None


def test_the_one_with_the_lowest_executions_times_priority_goes_first() -> None:
    resources = Resources()
    order = ""
    queues = {name: queue_of(resources, needing(1, priority=priority)) for name, priority in (("a", 1), ("b", 3))}
    tickets = {name: [queue.draw() for _ in range(50)] for name, queue in queues.items()}
    for _ in range(40):
        (name,) = [name for name, (first, *_) in tickets.items() if first.instance is not None]
        order += name
        queues[name].give_up(tickets[name].pop(0))
    assert order.count("a") == 30
    assert order.count("b") == 10
    assert "aaaa" not in order


def test_one_that_comes_late_saves_nothing_up() -> None:
    resources = Resources()
    old = queue_of(resources, needing(1))
    for _ in range(1000):
        old.give_up(old.draw())
    new = queue_of(resources, needing(1))
    queues, order = (old, new), []
    lines = [[queue.draw() for _ in range(20)] for queue in queues]
    for _ in range(20):
        which = 0 if lines[0][0].instance is not None else 1
        order.append(which)
        queues[which].give_up(lines[which].pop(0))
    assert sorted(order) == [0] * 10 + [1] * 10


def test_a_model_that_is_unloaded_gives_everything_back_and_its_work_that_goes_on_when_it_ends() -> None:
    resources = Resources(["R:2"])
    claims = resources.register("m", [needing(2), needing(2)])
    assert claims is not None
    queue, other = InstanceQueue(2, claims=claims), queue_of(resources, needing(1))
    running, _ = queue.draw(), queue.draw()
    waiting = other.draw()
    claims.close()
    assert waiting.instance is None, "work goes on"
    queue.give_up(running)
    assert waiting.instance is not None
    assert resources.held(("R", 0)) == 1


@pytest.mark.parametrize("rule", ["", "R", "R:", "R:x", ":1", "R:1:", "R:1:x", "R:-1", "R:1:2:3"])
def test_a_rule_that_can_not_be_read_is_refused(rule: str) -> None:
    with pytest.raises(SetupError, match="--rate-limit-resource must be NAME:COUNT or NAME:COUNT:DEVICE"):
        Server(rate_limit=RateLimit(rate_limit_resource=(rule,)))


def test_a_need_that_can_never_be_met_is_refused_in_words() -> None:
    resources = Resources(["R:3"])
    with pytest.raises(ModelLoadError) as caught:
        resources.register("m", [needing(1), needing(4)])
    assert 'Resource count for "R" is limited to 3 which will prevent scheduling' in str(caught.value)
    resources.register("m", [needing(1)])
    for other in ([needing(1, device=None)], [needing(1, "S"), needing(1, "S", None)]):
        with pytest.raises(ModelLoadError, match="present as both global and device-specific resource"):
            resources.register("n", other)


def test_the_configuration_says_what_each_instance_needs() -> None:
    text = """
    instance_group {
      count: 1
      rate_limiter { resources { name: "R" count: 2 } resources { name: "all" global: true count: 1 } }
    }
    instance_group { kind: KIND_GPU gpus: [ 1, 2 ] rate_limiter { priority: 5 resources { name: "R" count: 3 } } }
    instance_group { count: 1 }
    """
    config = ModelConfig.parse(text, name="m", where=Path("config.pbtxt"))
    assert [config.instance_needs(index) for index in range(4)] == [
        Needs({("R", 0): 2, ("all", None): 1}),
        Needs({("R", 1): 3}, 5),
        Needs({("R", 2): 3}, 5),
        Needs(),
    ]


# -- In any order ----------------------------------------------------------------------------------------------------

POOLS: list[Pool] = [("R", 0), ("R", 1), ("all", None)]
NEEDS = st.builds(Needs, st.dictionaries(st.sampled_from(POOLS), st.integers(1, 3), max_size=2), st.integers(1, 3))


async def _attend(send: Send) -> None: ...


def _start(batch: Sequence[tuple[Instance, InferRequest]]) -> Sequence[Attend]:
    for instance, _ in batch:
        instance.begin()
    return [_attend for _ in batch]


class SharingMachine(RuleBasedStateMachine):
    """Requests of several models come, leave, are deaf and end in any order; models are unloaded, too."""

    def __init__(self) -> None:
        super().__init__()
        self.resources = Resources(["R:4", "all:3"])
        self.queues: list[InstanceQueue] = []
        self.needs: list[Sequence[Needs]] = []
        self.claims: list[Claims | None] = []
        self.tickets: list[tuple[int, Ticket]] = []
        self.working: list[tuple[int, Instance]] = []
        self.noted: list[Instance] = []

    @initialize(
        models=st.lists(st.tuples(st.lists(NEEDS, min_size=1, max_size=3), st.booleans()), min_size=1, max_size=4)
    )
    def load(self, models: list[tuple[list[Needs], bool]]) -> None:
        for needs, joins in models:
            claims = self.resources.register("m", needs)
            batching = Batching() if joins else None
            self.claims.append(claims)
            self.needs.append(needs)
            self.queues.append(
                InstanceQueue(len(needs), claims=claims, batching=batching, max_batch_size=3, start=_start)
            )

    def note(self) -> None:
        for model, ticket in self.tickets:
            instance = ticket.instance
            if instance is not None and instance not in self.noted:
                self.noted.append(instance)
                if not instance.working:
                    instance.begin()
                self.working.append((model, instance))

    @rule(data=st.data(), rows=st.integers(1, 3))
    def come(self, data: st.DataObject, rows: int) -> None:
        model = data.draw(st.integers(0, len(self.queues) - 1))
        self.tickets.append((model, self.queues[model].draw(Life(), REQUEST, rows=rows)))
        self.note()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), cancelled=st.booleans())
    def leave(self, data: st.DataObject, cancelled: bool) -> None:
        model, ticket = self.tickets[data.draw(st.integers(0, len(self.tickets) - 1))]
        if cancelled:
            assert ticket.life is not None
            ticket.life.cancel(CancelReason.DISCONNECTED)
            self.note()
        self.tickets.remove((model, ticket))
        self.queues[model].give_up(ticket)
        self.note()

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, instance = self.working.pop(data.draw(st.integers(0, len(self.working) - 1)))
        instance.end()
        self.note()

    @invariant()
    def nobody_has_more_than_there_is_and_no_instance_idles_while_somebody_waits_who_may(self) -> None:
        held: dict[Pool, int] = {}
        busy = {(model, instance.index) for model, instance in self.working}
        for model, index in busy:
            for pool, count in self.needs[model][index].pools.items():
                held[pool] = held.get(pool, 0) + count
        for pool in POOLS:
            assert held.get(pool, 0) == self.resources.held(pool) <= self.resources.size(pool)

        def idle(model: int) -> list[Mapping[Pool, int]]:
            free = [index for index in range(len(self.needs[model])) if (model, index) not in busy]
            return [self.needs[model][index].pools for index in free]

        def fits(needs: Mapping[Pool, int]) -> bool:
            return all(held.get(pool, 0) + count <= self.resources.size(pool) for pool, count in needs.items())

        wanting = [model for model, queue in enumerate(self.queues) if queue.statistics().waiting]
        blocked = [needs for model in wanting for needs in idle(model) if not fits(needs)]
        for model in wanting:
            for needs in idle(model):
                reserved = {pool for other in blocked for pool in other}
                assert not fits(needs) or reserved & needs.keys(), "an instance idles while somebody waits"

    def teardown(self) -> None:
        while self.tickets:
            model, ticket = self.tickets.pop()
            self.queues[model].give_up(ticket)
            self.note()
        for _, instance in self.working:
            instance.end()
        for claims in self.claims:
            if claims is not None:
                claims.close()
        assert not any(self.resources.held(pool) for pool in POOLS)


SharingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_resources_balance_whatever_happens = SharingMachine.TestCase


# -- With a repository -----------------------------------------------------------------------------------------------

CODE = """
import trio
from trio_infer import Model, TensorSpec


class It(Model):
    inputs = outputs = (TensorSpec("x", "FP32", [1]),)

    async def infer(self, request):
        await trio.sleep(float(request.inputs["x"][0]))
        return request.inputs
"""
LIMITER = 'backend: "trio_infer"\ninstance_group {{ rate_limiter {{ resources {{ name: "R" count: {count} }} }} }}\n'


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., ModelRepository]:
    def write(**counts: int) -> ModelRepository:
        for name, count in counts.items():
            (tmp_path / name / "1").mkdir(parents=True)
            (tmp_path / name / "1" / "model.py").write_text(CODE, encoding="utf-8")
            (tmp_path / name / "config.pbtxt").write_text(LIMITER.format(count=count), encoding="utf-8")
        return ModelRepository([tmp_path])

    return write


async def test_models_of_a_repository_wait_for_each_other_only_if_that_is_asked_for(
    write: Callable[..., ModelRepository],
) -> None:
    repository = write(one=1, two=1)
    ask = {
        model: post(model, "infer", {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1000]}]})
        for model in ("one", "two")
    }
    policies: list[tuple[RateLimit, int]] = [(RateLimit(), 0), (RateLimit(rate_limit="execution_count"), 1)]
    for policy, waiting in policies:
        async with serving(memory=True, repository=repository, rate_limit=policy) as served:

            def running(name: str, server: Server = served.server) -> tuple[int, int]:
                queue = server.statistics().models[name, "1"]
                return queue.running, queue.waiting

            clients = {model: served.connect_in_memory() for model in ask}
            for model, client in clients.items():
                await client.send(ask[model])
                await trio.testing.wait_all_tasks_blocked()
            assert (running("one"), running("two")) == ((1, 0), (1 - waiting, waiting))
            await clients["one"].close()
            await served.ended(1)
            assert running("two") == (1, 0), "it runs in the instant in which the other one's work has ended"
            await clients["two"].close()
            await served.ended(2)


async def test_a_model_that_needs_more_than_there_is_can_not_be_loaded(write: Callable[..., ModelRepository]) -> None:
    repository = write(big=3)
    policy = RateLimit(rate_limit="execution_count", rate_limit_resource=("R:2",))
    server = Server(repository=repository, rate_limit=policy)
    with pytest.raises(ModelLoadError, match='Resource count for "R" is limited to 2'):
        await server.serve(listeners=[])
