"""An interrupt (Ctrl-C, a timeout's signal) at each place where Python may deliver one, to see what it leaves.

Python looks for signals when a function begins, after a call and where a loop goes back; a trace function raises there
instead.
"""

import dis
import signal
import sys
from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

__all__ = ["Interrupt", "Second", "interrupted_at"]

_CALLS = ("RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_KW")


class Interrupt(BaseException):
    """What a signal's handler may raise."""


@cache
def _steps(code: CodeType) -> dict[int, str]:
    return {step.offset: step.opname for step in dis.get_instructions(code)}


@cache
def _behind_calls(code: CodeType) -> frozenset[int]:
    return frozenset(behind for (_, name), (behind, _) in pairwise(_steps(code).items()) if name in _CALLS)


def interrupted_at(
    number: int,
    action: Callable[[], Any],
    *files: str | None,
    exact: bool = False,
    only: Iterable[str] = (),
    handler: Callable[[], Any] | None = None,
) -> bool:
    """Do `action` with an interrupt at that check within `files`; False where it ended before.

    With `only`, in the functions of these names alone. `handler` is what the signal's does before it raises.

    The checks are the steps behind each call, also behind one of a function of Python, where the interpreter makes
    none: a test that passes so does not depend on its version. With `exact` they are the interpreter's own, for code
    that can get a value into a variable of its own in no other way; also where a loop goes back.
    """
    seen = 0
    done: dict[FrameType, str] = {}  # the step that a frame has just done

    def due(frame: FrameType) -> bool:
        if not exact:
            return frame.f_lasti in _behind_calls(frame.f_code)
        before, done[frame] = done.get(frame), _steps(frame.f_code)[frame.f_lasti]
        return before is not None and (before in _CALLS or "JUMP_BACKWARD" in before)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        name = frame.f_code.co_name
        if event == "call" and frame.f_back in done and not name.startswith("__"):  # those are called through C
            done[frame.f_back] = "a call of Python"
        if frame.f_code.co_filename not in files or name == "_keep":
            return None
        if only and name not in only:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and due(frame):
            seen += 1
            if seen == number:
                sys.settrace(None)
                if handler is not None:
                    handler()
                raise Interrupt(f"{name}, line {frame.f_lineno}")
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except Interrupt:
        return True
    finally:
        sys.settrace(outer)
    return False


class Second:
    """Another interrupt, by a signal so many microseconds after the first; its `start` is the first one's `handler`.

    It raises only in `files`, and what they call. Its timer is the one of pytest-timeout's method "signal".
    """

    def __init__(self, delay: int, *files: str | None) -> None:
        self._delay = delay
        self._files = files
        self._before: Any = None

    def start(self) -> None:
        """Count from here."""
        signal.setitimer(signal.ITIMER_REAL, self._delay * 1e-6)

    def _hit(self, _: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename in self._files:
                raise Interrupt("the second")
            frame = frame.f_back

    def __enter__(self) -> "Second":
        self._before = signal.signal(signal.SIGALRM, self._hit)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
