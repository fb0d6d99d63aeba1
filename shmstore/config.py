"""Compiler flags for C programs that use shmstore: ``cc producer.c $(python -m shmstore.config --cflags --libs)``."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent


def flags(*, cflags: bool = False, libs: bool = False, static: bool = False) -> list[str]:
    """Return the flags that compile, or link, a program in C; with `static` it needs no shared library of ours."""
    lib = HERE / "lib"
    linked = [str(lib / "libshmstore.a"), "-pthread", "-lrt"]
    shared = [f"-L{lib}", f"-Wl,-rpath,{lib}", "-lshmstore"]
    return [f"-I{HERE / 'include'}"] * cflags + (linked if static else shared) * libs


def main(argv: Sequence[str] | None = None) -> None:
    """Print what the options ask for on one line."""
    parser = argparse.ArgumentParser(prog="python -m shmstore.config", description=__doc__)
    parser.add_argument("--cflags", action="store_true", help="flags to compile with")
    parser.add_argument("--libs", action="store_true", help="flags to link with")
    parser.add_argument("--static", action="store_true", help="link the static library")
    parser.add_argument("--pkgconfigdir", action="store_true", help="the folder of shmstore.pc, for PKG_CONFIG_PATH")
    options = parser.parse_args(argv)
    if options.pkgconfigdir:
        print(HERE / "lib" / "pkgconfig")
    elif options.cflags or options.libs:
        print(shlex.join(flags(cflags=options.cflags, libs=options.libs, static=options.static)))
    else:
        parser.error("nothing to print: name --cflags, --libs or --pkgconfigdir")


if __name__ == "__main__":
    main()
