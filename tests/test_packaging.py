"""What is installed from an index or a file: the wheel, made from the source distribution."""

from __future__ import annotations

import os
import re
import sys
import tarfile
import zipfile
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple

import pytest

import commands
import otel_ddp
from extras import needed

ROOT = Path(__file__).parents[1]


class Built(NamedTuple):
    """Both distributions, unpacked."""

    source: Path
    wheel: Path

    @property
    def distribution(self) -> Distribution:
        (found,) = distributions(path=[str(self.wheel)])
        return found


def build(kind: str, folder: Path, into: Path) -> Path:
    """Build without a network: the tool of the build is in the extra `dev`."""
    command = (sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", into)
    done = commands.run(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    (made,) = into.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    needed("hatchling", "dev")
    folder = tmp_path_factory.mktemp("dist")
    with tarfile.open(build("sdist", ROOT, folder)) as archive:
        archive.extractall(folder, filter="data")
    (source,) = (path for path in folder.iterdir() if path.is_dir())
    with zipfile.ZipFile(build("wheel", source, folder)) as archive:
        archive.extractall(folder / "unpacked")
    return Built(source, folder / "unpacked")


def files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


# All that is deployed but the tests of the rules.
DEPLOYED = {
    f"deploy/{name}" for name in files(ROOT / "deploy") if not name.startswith("prometheus/tests/")
}


def test_a_wheel_holds_the_whole_package_and_nothing_else(built: Built) -> None:
    there = files(ROOT / "src" / "otel_ddp") | DEPLOYED
    assert files(built.wheel / "otel_ddp") == there
    assert "py.typed" in files(built.wheel / "otel_ddp")
    static = built.wheel / "otel_ddp" / "history" / "page" / "static"
    assert "Leon Sorokin" in (static / "uplot.LICENSE.txt").read_text()
    assert list(built.wheel.glob("*.dist-info/licenses/LICENSE"))
    assert {path.name for path in built.wheel.iterdir()} == {
        "otel_ddp",
        f"otel_ddp-{otel_ddp.__version__}.dist-info",
    }


def test_a_source_distribution_holds_what_the_tests_need_and_nothing_that_was_built(
    built: Built,
) -> None:
    there = {path.name for path in built.source.iterdir()}

    needs = {"bench", "deploy", "docs", "examples", "src", "tests", "tools"}
    assert {*needs, "CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt"} <= there
    assert not there & {".git", ".stack", ".venv", "dist"}
    assert files(built.source / "tests") >= {"conftest.py", "test_packaging.py"}


def test_what_is_installed_without_an_extra_brings_neither_torch_nor_test_tools(
    built: Built,
) -> None:
    required = [each for each in built.distribution.requires or [] if "extra ==" not in each]

    assert {re.split(r"[<>=!~ ;\[]", each)[0] for each in required} == {
        "cryptography",
        "nvidia-ml-py",
        "opentelemetry-exporter-otlp",
        "opentelemetry-sdk",
        "prometheus-client",
    }


def test_the_unpacked_wheel_records_a_value_and_has_its_command(
    built: Built, tmp_path: Path
) -> None:
    env = os.environ | {"PYTHONPATH": str(built.wheel), "OTEL_DDP_AGENT": "off"}
    env |= {"OTEL_DDP_DIR": str(tmp_path / "place")}
    code = (
        "import otel_ddp\n"
        "with otel_ddp.init(group='g') as run: run.log({'loss': 1.0})\n"
        "print(otel_ddp.__file__)"
    )

    def python(*arguments: str) -> str:
        done = commands.run(sys.executable, *arguments, cwd=tmp_path, env=env, check=True)
        return done.stdout.strip()

    assert python("-c", code) == str(built.wheel / "otel_ddp" / "__init__.py")
    assert python("-m", "otel_ddp", "--version") == f"otel-ddp {otel_ddp.__version__}"
    there = {name: (built.wheel / "otel_ddp" / name).read_bytes() for name in DEPLOYED}
    assert there == {name: (ROOT / name).read_bytes() for name in DEPLOYED}
    assert {(each.group, each.name, each.value) for each in built.distribution.entry_points} == {
        ("console_scripts", "otel-ddp", "otel_ddp.cli:main"),
    }


def test_the_images_of_the_deployments_have_the_version_of_the_package() -> None:
    deploy = ROOT / "deploy"
    pages = [*(p for p in (deploy / "kubernetes").rglob("*") if p.is_file())]
    pages += [deploy / "values.schema.json", ROOT / "docs" / "deploy.md"]
    tags = [
        (path.name, tag)
        for path in pages
        for tag in re.findall(r"/otel-ddp-(?:agent|training):([\w.]+)", path.read_text())
    ]

    assert tags
    assert [each for each in tags if each[1] != otel_ddp.__version__] == []
