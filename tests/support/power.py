"""A disk whose power can be cut: what was not flushed is gone, also from the page cache."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from pathlib import Path
from typing import Final

# EXT4_IOC_SHUTDOWN of the kernel: from now on nothing is written to the disk.
_SHUTDOWN: Final = 0x8004587D
# Do not even write the journal.
_NO_LOG_FLUSH: Final = 2
_SIZE: Final = 3 * 2**30


class Disk:
    """A file system of its own in a file, mounted at `folder`. It needs the rights to mount, and ext4.

    The kernel's shutdown of a file system keeps all that was flushed before, and nothing else. Dirty pages and the
    journal's open transaction are dropped.
    """

    def __init__(self, image: Path, folder: Path) -> None:
        self._image = image
        self._folder = folder
        with image.open("wb") as file:
            file.truncate(_SIZE)
        folder.mkdir()

    def mount(self) -> bool:
        """Make and mount the file system; return False if that is not allowed here."""
        made = _run("mkfs.ext4", "-q", "-F", str(self._image))
        return made and _run("mount", "-o", "loop", str(self._image), str(self._folder))

    def cut(self) -> None:
        """Write nothing more. Programs get errors when they flush."""
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(folder)

    def restore(self) -> None:
        """Mount it again, after its programs have ended."""
        assert _run("umount", str(self._folder))
        assert _run("mount", "-o", "loop", str(self._image), str(self._folder))

    def remove(self) -> None:
        """Unmount it."""
        _run("umount", "--lazy", str(self._folder))
        self._image.unlink()


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
