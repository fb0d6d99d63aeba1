"""Build script: what is declarative is in pyproject.toml, and csrc/build_ffi.py says what the extension is made of."""

import re
import shutil
import sys
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import setup
from setuptools.command.build_clib import build_clib

PKG_CONFIG = """\
prefix=${{pcfiledir}}/../..

Name: shmstore
Description: {description}
Version: {version}
Cflags: -I${{prefix}}/include
Libs: -L${{prefix}}/lib -Wl,-rpath,${{prefix}}/lib -lshmstore
Libs.private: -pthread -lrt
"""


def interface(version: str) -> str:
    """Return the version that the C interface holds for: the first two numbers, also of 0.1.0.post1 and 0.2.dev3."""
    return re.match(r"\d+\.\d+", version)[0]


class BuildLibrary(build_clib):
    """Compile the store once: for the extension, which links it statically, and for programs in C.

    What these need goes into the package, for `python -m shmstore.config`.
    """

    def initialize_options(self):
        """Add an option that setuptools sets for an editable installation."""
        super().initialize_options()
        self.inplace = False

    def build_libraries(self, libraries):
        """Compile as the extension is compiled, and make the package's `include` and `lib`."""
        ((_, library),) = libraries
        (extension,) = self.distribution.ext_modules
        library.update(cflags=extension.extra_compile_args, include_dirs=extension.include_dirs)
        super().build_libraries(libraries)

        version = self.distribution.get_version()
        package = Path("" if self.inplace else self.get_finalized_command("build_py").build_lib, "shmstore")
        folders = include, lib, pkgconfig = package / "include", package / "lib", package / "lib" / "pkgconfig"
        shutil.rmtree(lib, ignore_errors=True)  # it may have another version
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        shutil.copy("csrc/store/shmstore.h", include)
        shutil.copy(Path(self.build_clib, "libshmstore.a"), lib)
        soname = f"libshmstore.so.{interface(version)}"
        objects = self.compiler.object_filenames(library["sources"], output_dir=self.build_temp)
        flags = [f"-Wl,-soname,{soname}", "-pthread", "-lrt"]
        self.compiler.link_shared_object(objects, str(lib / soname), extra_postargs=flags)
        # A wheel has no links. The linker reads this file as it would read the library.
        (lib / "libshmstore.so").write_text(f"INPUT({soname})\n")
        text = PKG_CONFIG.format(version=version, description=self.distribution.get_description())
        (pkgconfig / "shmstore.pc").write_text(text)


# Without the GIL, Python has a stable interface of C from 3.15 on: 3.14 gets a wheel of its own.
STABLE = "cp311"
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    STABLE = "cp315" if sys.version_info >= (3, 15) else False

setup(
    cffi_modules=["csrc/build_ffi.py:ffibuilder"],
    libraries=[("shmstore", {"sources": sorted(glob("csrc/store/*.c")), "obj_deps": {"": glob("csrc/store/*.h")}})],
    cmdclass={"build_clib": BuildLibrary},
    options={"bdist_wheel": {"py_limited_api": STABLE}},
)
