"""`python -m examples.demo`, in the root of the source tree."""

import sys

from examples.demo.main import main

if __name__ == "__main__":
    sys.exit(main())
