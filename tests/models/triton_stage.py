"""What the tests of models share: models written to a temporary repository, and a client to ask them."""

from __future__ import annotations

import textwrap
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np
import trio

from trio_infer.models.host import NoHost
from trio_infer.models.repository import find_models
from trio_infer.models.runner import Instance
from trio_infer.protocol.values import InferRequest, InferResponse

CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }\n"
PRELUDE = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n"


class Repository:
    """Models in a directory; they run in threads, so that tests share a stage with them, unless told otherwise."""

    def __init__(self, root: Path, execution: Literal["process", "thread"] = "thread") -> None:
        self.root = root
        self.execution = execution

    def write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return file

    def model(self, name: str, code: str, config: str = CONFIG) -> Path:
        """A model with `code` as its model.py, below two lines of imports."""
        if config:
            self.write(f"{name}/config.pbtxt", config)
        return self.write(f"{name}/1/model.py", PRELUDE + textwrap.dedent(code))

    def runner(self, name: str = "m", **options: Any) -> Any:
        runners = find_models([self.root], **{"execution": self.execution, **options})
        return next(runner for runner in runners if runner.signature.name == name)

    async def loaded(self, code: str, config: str = CONFIG, **options: Any) -> Any:
        """A loaded runner of a model `m` with `code`."""
        self.model("m", code, config)
        runner = self.runner()
        for option, value in options.items():
            setattr(runner, option, value)
        await runner.load(NoHost())
        return runner


class Client:
    """One request, its responses, and a flag that turns when the client leaves."""

    def __init__(self, runner: Any, *, index: int = 0, **fields: Any) -> None:
        self.runner = runner
        self.left = False
        self.responses: list[InferResponse] = []
        self.idle = trio.Event()
        self.instance = Instance(index, on_end=self.idle.set)
        inputs = fields.pop("inputs", {"IN": np.array([1, 2], dtype=np.float32)})
        self.request = InferRequest(
            runner.signature.name, runner.signature.version, inputs, is_cancelled=lambda: self.left, **fields
        )
        self.scope = trio.CancelScope()
        self.gone = trio.Event()

    async def send(self, response: InferResponse) -> None:
        self.responses.append(response)

    async def ask(self) -> InferResponse:
        """Run to the end; the last response."""
        with trio.fail_after(10):
            await self.runner.run(self.instance, self.request, self.send)
        return self.responses[-1]

    async def stay(self) -> None:
        """Run until the end or until `leave`."""
        with self.scope:
            await self.runner.run(self.instance, self.request, self.send)
        self.gone.set()

    def leave(self) -> None:
        self.left = True
        self.scope.cancel()


async def happens(event: threading.Event) -> None:
    """Wait until a model's thread sets an event."""
    with trio.fail_after(10):
        assert await trio.to_thread.run_sync(event.wait, 10, abandon_on_cancel=True)
