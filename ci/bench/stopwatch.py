"""Where an example's time goes: the suite's own functions, timed from outside while it judges."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import impl.bindings
import impl.observe
import oracle.expect
import oracle.judge
import oracle.relations
import oracle.values
from impl.devices.base import Device

PHASES = ("build", "memory", "run", "oracle", "judge", "other")
"""Values from the seed; memory laid out, sent and read back; the implementation's calls, until the device
is idle; the oracle; the comparison; what is none of these, such as a served request's bookkeeping."""
_FUNCTIONS: Mapping[str, tuple[Callable[..., Any], ...]] = {
    "build": (oracle.values.build,),
    "memory": (impl.observe.observe,),
    "oracle": (oracle.expect.expect,),
    "judge": (oracle.judge.judge, oracle.relations.disagreements),
}
_OURS = ("ci", "impl", "oracle", "tests")


class Stopwatch:
    """Seconds per phase; what runs inside another phase counts for itself alone."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._stack: list[str] = []
        self._since = 0.0

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens meanwhile."""
        self._turn()
        self._stack.append(name)
        try:
            yield
        finally:
            self._turn()
            self._stack.pop()

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time counted."""

        def timed(*arguments: Any, **named: Any) -> Any:
            with self.phase(name):
                return function(*arguments, **named)

        return timed

    @contextmanager
    def watching(self, device: Device) -> Iterator[None]:
        """Count every phase: wherever a module of ours holds one of its functions, it holds a timed one."""
        undo: list[tuple[Any, str, Callable[..., Any]]] = []
        bindings = dict(impl.bindings.BINDINGS)
        try:
            for phase, functions in _FUNCTIONS.items():
                for function in functions:
                    for module, name in _holders(function):
                        undo.append((module, name, function))
                        setattr(module, name, self.around(phase, function))
            for operation, bind in bindings.items():
                impl.bindings.BINDINGS[operation] = self._bound(bind, device)
            with self.phase("other"):
                yield
        finally:
            impl.bindings.BINDINGS.update(bindings)
            for module, name, function in undo:
                setattr(module, name, function)

    def _bound(self, bind: Callable[..., Any], device: Device) -> Callable[..., Any]:
        """The binding, of which the call is timed to its end on the device."""

        def binding(*arguments: Any) -> Callable[[], Any]:
            run = bind(*arguments)

            def timed() -> Any:
                with self.phase("run"):
                    result = run()
                    device.synchronize()
                return result

            return timed

        return binding


def _holders(function: Callable[..., Any]) -> list[tuple[Any, str]]:
    """Every module of ours with a name that means the function."""
    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] in _OURS]
    return [(m, name) for m in modules for name, value in list(vars(m).items()) if value is function]
