"""Hooks that stop a PyTorch model between two of its modules."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from trio_infer.errors import RunCancelled

torch = pytest.importorskip("torch", reason="needs the extra `torch` or `transformers`")

from trio_infer.models.backends.torch_hooks import StopHooks, asking, stop_points  # noqa: E402 (it imports torch)

SOON = 30


class Block(torch.nn.Module):  # type: ignore[misc]  # torch may not be there to check
    """Two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


class Network(torch.nn.Module):  # type: ignore[misc]  # torch may not be there to check
    """Blocks, and a module before them."""

    def __init__(self) -> None:
        super().__init__()
        self.before = torch.nn.Linear(3, 3)
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x: Any) -> Any:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_the_grain_says_which_modules_are_hooked() -> None:
    network = Network()
    one, two = network.blocks
    assert stop_points(network, "none") == []
    assert stop_points(network, "blocks") == [one, two]
    assert stop_points(network, "parts") == [one, one.first, one.second, two, two.first, two.second]
    assert set(stop_points(network, "all")) == set(network.modules())
    assert stop_points(one, "blocks") == [one.first, one.second], "without a list of blocks, its children"
    assert stop_points(one.first, "blocks") == [one.first], "without children, itself"


def test_a_run_that_is_cancelled_leaves_at_the_next_module_and_the_module_is_as_good_as_before() -> None:
    network, x = Network(), torch.ones(2, 3)
    expected = network(x)
    hooks = StopHooks(stop_points(network))
    answers = iter([False, False, False, True])
    entered: list[Any] = []
    network.blocks[1].first.register_forward_pre_hook(lambda module, _: entered.append(module))
    with pytest.raises(RunCancelled), asking(lambda: next(answers)):
        network(x)
    assert not entered, "the fourth to ask was the second block"
    with asking(lambda: False):
        assert torch.equal(network(x), expected)
    assert len(hooks) == 6


def test_outside_of_a_run_nobody_is_asked() -> None:
    network = Network()
    hooks = StopHooks(stop_points(network, "all"))
    with asking(lambda: True):
        pass
    network(torch.ones(1, 3))
    hooks.remove()
    assert len(hooks) == 0
    assert not any(module._forward_pre_hooks for module in network.modules())
    with asking(lambda: True):
        network(torch.ones(1, 3))


def test_of_two_threads_that_share_a_module_the_one_that_is_cancelled_leaves() -> None:
    network, x = Network(), torch.ones(2, 3)
    expected = network(x)
    hooks = StopHooks(stop_points(network))
    both = threading.Barrier(2)
    ends: dict[bool, Any] = {}

    def wait(*_: Any) -> None:
        both.wait(SOON)

    network.blocks[0].second.register_forward_pre_hook(wait)

    def run(cancelled: bool) -> None:
        asked: list[int] = []

        def is_cancelled() -> bool:
            asked.append(1)
            return cancelled and len(asked) > 3  # so that it has met the other one in the first block

        try:
            with asking(is_cancelled):
                ends[cancelled] = network(x)
        except RunCancelled as error:
            ends[cancelled] = error

    threads = [threading.Thread(target=run, args=(cancelled,)) for cancelled in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert isinstance(ends[True], RunCancelled)
    assert torch.equal(ends[False], expected)
    hooks.remove()
