"""What tests of several folders share. The harness is in `tests/harness/`:

* `servers`: clusters and official clients;
* `spark`: the Spark session;
* `scheduling`: which tests one process runs together, and the option `--full`;
* `speed`: settings that make the suite faster, and what each one saves;
* `class_archive`: the archive of classes from which Spark's JVMs start.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from tests.support.cluster import SharedCluster, create_topic
from tests.support.kernels import can_build
from tests.tools.packages import Built, build

pytest_plugins = [f"tests.harness.{module}" for module in ("scheduling", "servers", "spark", "speed")]
pytest.register_assert_rewrite("tests.support.contract")

# A slow machine fails no test. With CI=true, all runs use the same examples. Otherwise each run has new ones.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """The name of a topic that no other test uses. The first message creates the topic."""
    name = re.sub(r"[^a-zA-Z0-9_-]+", "_", request.node.name)[:80]
    return f"{name}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def make_topic(cluster: SharedCluster, topic: str) -> Callable[..., str]:
    """Create the test's topic for messages of a type, on all brokers, and return its name."""

    def make(message_type: str, name: str = topic, queues: int = 2) -> str:
        return create_topic(cluster, name, message_type, queues)

    return make


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether faults have their full length (`--full`)."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The package as a release of it would be."""
    return build(tmp_path_factory.mktemp("built"), compiled=can_build())
