"""The one package that knows cffi: Python values in, Python values out, no cdata beyond it."""

from importlib import import_module
from pathlib import Path

try:
    import_module("shmstore.bindings._shmstore")
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"shmstore's C part is not built in {Path(__file__).parent.parent.parent} (hint: Python finds an installed "
        "shmstore from another folder; in a checkout, `python -m pip install --editable .` builds it)",
        name=error.name,
    ) from None
