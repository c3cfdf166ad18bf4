"""The wheel of `make dist` as strangers meet it: alone, on each Python and torch."""

import json
import re
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PYTHONS = nox.project.python_versions(nox.project.load_toml(ROOT / "pyproject.toml"))
# torch has no older wheels for these.
FIRST = {"3.13": "2.6", "3.14": "newest", "3.14t": "newest"}
TORCHES = ("2.4", "2.6", "newest")
CASES = [
    (python, torch)
    for python in (*PYTHONS, "3.14", "3.14t")
    for torch in TORCHES[TORCHES.index(FIRST.get(python, TORCHES[0])) :]
]
EACH_NAME = "import otel_ddp; print([getattr(otel_ddp, each) for each in otel_ddp.__all__])"
# Where the names of `otel_ddp.__all__` live.
PUBLIC = re.compile(
    r"otel_ddp\.(\w+$|run\.api\.|run\.run\.Run\b|identity\.identity\.Identity\b|errors\.[A-Z])"
)

# One store of wheels for a dozen environments of 5 GB.
nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"
# One that is not here is named at the end.
nox.options.error_on_missing_interpreters = False


def install(session: nox.Session, torch: str, *packages: str) -> None:
    (wheel,) = ROOT.glob("dist/*.whl")
    version = "" if torch == "newest" else f"=={torch}.*"
    session.install(f"{wheel}[torch]", f"torch{version}", *packages)


@nox.session
@nox.parametrize(("python", "torch"), CASES)
def wheel(session: nox.Session, torch: str) -> None:
    """Install the wheel where nothing else is, look for what is missing, and train."""
    install(session, torch)
    session.run("uv", "pip", "check")
    session.chdir(session.create_tmp())
    session.run("python", "-c", "import torch; print('torch', torch.__version__)")
    session.run("python", "-c", EACH_NAME)
    session.run("otel-ddp", "doctor")
    session.run("otel-ddp", "demo", "--seconds", "10")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of a user's program, and that each public name has one."""
    install(session, "newest", "numpy", "mypy", "basedpyright")
    program = str(ROOT / "tests" / "typing" / "api.py")
    session.chdir(session.create_tmp())
    session.run("mypy", "--strict", program)
    strict = {"typeCheckingMode": "strict", "enableTypeIgnoreComments": True}
    Path("pyrightconfig.json").write_text(
        json.dumps({**strict, "reportUnnecessaryTypeIgnoreComment": "error"})
    )
    session.run("basedpyright", "--project", ".", program)
    # It fails for whatever is not public, too.
    verify = ("basedpyright", "--verifytypes", "otel_ddp", "--ignoreexternal", "--outputjson")
    told = session.run(*verify, success_codes=[0, 1], silent=True, stderr=None)
    symbols = json.loads(str(told))["typeCompleteness"]["symbols"]
    known = {each["name"]: each["isTypeKnown"] for each in symbols if PUBLIC.match(each["name"])}
    session.log(f"{sum(known.values())} of {len(known)} public names have a type.")
    if not all(known.values()):
        session.error(f"not so {', '.join(name for name, has in known.items() if not has)}")
