"""OpenTelemetry's own command finds the instrumentor, and it does what `otel-ddp run` does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from extras import needed
from otel_ddp.integrations.launch import this_process
from otel_ddp.integrations.launch.startup.sitecustomize import Finder

ROOT = Path(__file__).parents[2]
NO_EXPORT = {f"OTEL_{each}_EXPORTER": "none" for each in ("TRACES", "METRICS", "LOGS")}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the entry points that an installation of this checkout would have."""
    needed("hatchling", "dev")
    from hatchling.metadata.core import ProjectMetadata
    from hatchling.plugin.manager import PluginManager

    declared = ProjectMetadata(str(ROOT), PluginManager()).core.entry_points
    folder = tmp_path / "otel_ddp-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: otel-ddp\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(
        "\n".join(
            f"[{group}]\n" + "\n".join(f"{name} = {value}" for name, value in points.items())
            for group, points in declared.items()
        )
    )
    return tmp_path


def test_the_command_of_opentelemetry_makes_a_process_wait_for_torch(installed: Path) -> None:
    needed("opentelemetry.instrumentation", "dev")
    command = shutil.which("opentelemetry-instrument", path=Path(sys.executable).parent)
    assert command
    paths = os.pathsep.join([str(installed), str(ROOT / "src")])
    code = "import sys; print([type(each).__module__ for each in sys.meta_path][0])"

    done = subprocess.run(
        [command, sys.executable, "-c", code],
        env={**os.environ, **NO_EXPORT, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.stdout, done.stderr) == (
        "otel_ddp.integrations.launch.startup.sitecustomize\n",
        "",
    )


def test_a_program_may_name_the_instrumentor_and_take_it_off_again() -> None:
    needed("opentelemetry.instrumentation", "dev")
    from otel_ddp.integrations.launch.instrumentor import OtelDdpInstrumentor

    before = list(sys.meta_path)
    OtelDdpInstrumentor().instrument(tracer_provider=None)
    this_process.begin()
    added = [each for each in sys.meta_path if each not in before]
    OtelDdpInstrumentor().uninstrument()

    assert [type(each) for each in added] == [Finder]
    assert sys.meta_path == before
