"""`python -m fat5` is the `fat5` command."""

import sys

from fat5.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
