"""See `tests.simulation.swarm`."""

import sys

from tests.simulation.swarm import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
