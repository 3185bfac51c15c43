"""Prints which kernel the install has; fails if this machine can build another one. `make check` runs it."""

from tests.support.kernels import check_built

if __name__ == "__main__":
    print(check_built())
