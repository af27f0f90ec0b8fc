"""`python -m llama_phase`: the command line."""

import sys

from llama_phase.cli import main

if __name__ == "__main__":
    sys.exit(main())
