"""The scripted transport is tested with the requests of the transport tests."""

from __future__ import annotations

from tests.unit.transport.conftest import batch_to, outcomes, request_to  # noqa: F401 - fixtures
