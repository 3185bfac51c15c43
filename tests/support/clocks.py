"""Processes whose wall clock a test sets. Their monotonic clocks run on.

A small library, which a C compiler makes, comes before the C library (`LD_PRELOAD`). It adds an offset to the wall
clock, which it reads from a mapped file. With libfaketime a broker was so slow that requests timed out.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

# Ten minutes, which is more than any timeout of a write.
BACK: Final = -600

_SOURCE: Final = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long long none = 0;
static const volatile long long *offset = &none;
static int (*next)(clockid_t, struct timespec *);

__attribute__((constructor)) static void map_clock(void) {
    const char *path = getenv("TEST_CLOCK_FILE");
    int file = path == NULL ? -1 : open(path, O_RDONLY);
    next = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) offset = mapped;
    close(file);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int failed = next == NULL ? (int)syscall(SYS_clock_gettime, id, now) : next(id, now);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec read;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &read)) return -1;
    now->tv_sec = read.tv_sec;
    now->tv_usec = read.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec read;
    if (clock_gettime(CLOCK_REALTIME, &read)) return -1;
    if (out != NULL) *out = read.tv_sec;
    return read.tv_sec;
}
"""


class FakeClock:
    """The wall clock of processes that start with the variables `environ`; `folder` gets its files.

    Skips the test without a C compiler for Linux; in CI, fails it.
    """

    def __init__(self, folder: Path) -> None:
        library, source, self.file = folder / "clock.so", folder / "clock.c", folder / "clock"
        source.write_text(_SOURCE)
        command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"]
        try:
            why = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        except FileNotFoundError as exc:
            why = str(exc)
        if not library.exists() or not sys.platform.startswith("linux"):
            text = f"building a library with a clock: {why or 'only Linux has LD_PRELOAD'}"
            pytest.fail(text) if os.environ.get("CI") else pytest.skip(text)
        self.file.write_bytes(bytes(8))
        self.environ = {"LD_PRELOAD": str(library), "TEST_CLOCK_FILE": str(self.file)}

    def set(self, seconds: int) -> None:
        """Set the clock to as many seconds after the machine's, or before it."""
        set_clock(self.file, seconds)

    @contextlib.contextmanager
    def for_new_processes(self) -> Iterator[None]:
        """Give the clock to all processes that this process starts."""
        before = {name: os.environ.get(name) for name in self.environ}
        os.environ.update(self.environ)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def set_clock(file: Path, seconds: int) -> None:
    """Set the clock of the processes that have mapped a file."""
    with file.open("r+b", buffering=0) as clock:
        clock.write(struct.pack("=q", seconds))
