"""Compare an SGLang with what the plug-in knows of it, by its sources: nothing of it is imported.

    python -m shmstore.integrations.sglang.compare sglang-0.5.23-*.whl

prints a line for each wheel: what is known, or the first difference. The plug-in asks the same before it changes
anything.
"""

import sys

from shmstore.integrations.compare import Sources, compare_wheels, difference, installed_sources
from shmstore.integrations.sglang.known import FEATURES

__all__ = ["difference", "installed", "main"]


def installed() -> Sources:
    """Return the sources of the SGLang in this environment; ModuleNotFoundError if there is none."""
    return installed_sources("sglang")


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each wheel; return 1 if something differs in one of them, else 0."""
    return compare_wheels("sglang", "SGLang", {"features": FEATURES}, arguments)


if __name__ == "__main__":
    sys.exit(main())
