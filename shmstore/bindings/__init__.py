"""The one package that knows cffi: Python values in, Python values out, no cdata beyond it."""
