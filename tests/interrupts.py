"""An interrupt (Ctrl-C, a timeout's signal) at each place where Python may deliver one, to see what it leaves.

Python looks for signals when a function begins, after a call and where a loop goes back; a trace function raises there
instead.
"""

import dis
import sys
from collections.abc import Callable, Iterable
from functools import cache
from types import CodeType, FrameType
from typing import Any

__all__ = ["Interrupt", "interrupted_at"]

_CALLS = ("RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_KW")


class Interrupt(BaseException):
    """What a signal's handler may raise."""


@cache
def _steps(code: CodeType) -> dict[int, str]:
    return {step.offset: step.opname for step in dis.get_instructions(code)}


def interrupted_at(number: int, action: Callable[[], Any], *files: str | None, only: Iterable[str] = ()) -> bool:
    """Interrupt `action` at that check within `files`, or `only` these functions; return False if it ended before."""
    seen = 0
    done: dict[FrameType, str] = {}  # the step that a frame has just done

    def due(frame: FrameType) -> bool:
        before, done[frame] = done.get(frame), _steps(frame.f_code)[frame.f_lasti]
        return before is not None and (before in _CALLS or "JUMP_BACKWARD" in before)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        name = frame.f_code.co_name
        if event == "call" and frame.f_back in done and not name.startswith("__"):  # those are called through C
            done[frame.f_back] = "a call of Python"
        if frame.f_code.co_filename not in files or name == "_keep" or (only and name not in only):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and due(frame):
            seen += 1
            if seen == number:
                sys.settrace(None)
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
