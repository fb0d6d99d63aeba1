"""Build script: everything declarative is in pyproject.toml, the C extension is here."""

from setuptools import setup

setup(
    cffi_modules=["csrc/build_ffi.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
