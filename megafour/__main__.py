"""`python -m megafour`, and `torchrun -m megafour` for the verbs that compute on several ranks."""

import sys

from megafour.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
