"""The commands are tested against the server of the admin tests."""

from __future__ import annotations

from tests.unit.admin.conftest import server  # noqa: F401 - a fixture
