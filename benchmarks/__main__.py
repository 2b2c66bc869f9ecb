import sys

from benchmarks.command_line import main

# Worker processes that are spawned import this file too.
if __name__ == "__main__":
    sys.exit(main())
