"""Phases files: what they may say, what is wrapped, and what is not there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.pool.phases.files import NEXT, PhasesFileError, PhaseTarget, load_phases, wrapped
from elastic.pool.phases.sources import check_sources
from tests.phases.stub_pool import StubPool

SCRIPT = """
import json, os, sys
import helper
from loop import Trainer

class Own:
    @staticmethod
    def generate(n):
        return n + 1

def update(trainer, value):
    return helper.inner(trainer, value)

trainer = Trainer()
for step in range(2):
    value = trainer.roll_out(step)
    value = Own.generate(value)
    value = trainer.forward(value)
    trainer.after()
print(json.dumps({"value": value, "argv": sys.argv, "name": __name__, "file": os.path.basename(__file__)}))
sys.exit(int(sys.argv[1]))
"""

LOOP = """
class State:
    def __init__(self):
        self.awake = True
    def park(self):
        self.awake = False
    def resume(self):
        self.awake = True

class Trainer:
    def __init__(self):
        self.state = State()
        self.engine = State()
    def roll_out(self, step):
        # In a pool what trains is parked, once it is known.
        assert self.engine.awake and (step == 0 or self.state.awake == ALONE)
        return step
    def forward(self, value):
        self.backward()
        assert self.state.awake
        return value * 2
    def backward(self):
        assert self.state.awake
    def after(self):
        assert self.state.awake

import os
ALONE = "ELASTIC_POOL" not in os.environ
"""

PHASES = """
[phases]
"loop:Trainer.roll_out" = { phase = "rollout", state = ["self.engine"] }
"loop:Trainer.forward" = { phase = "train", until = "loop:Trainer.after", state = ["self.state"] }
"loop:Trainer.backward" = { phase = "train", state = ["__main__:trainer.state"] }
"__main__:Own.generate" = "sync"
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("def inner(trainer, value):\n    return value\n")
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "phases.toml").write_text(PHASES)
    return tmp_path


def run(program: Path, *command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, *command],
        cwd=program,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), **environment},
    )


@pytest.mark.parametrize("as_module", [False, True])
def test_a_program_takes_its_turns_untouched(program: Path, as_module: bool) -> None:
    script = ["-m", "script"] if as_module else ["script.py"]
    command = wrapped(["python", "-u", *script, "0"], program / "phases.toml")
    assert command[:4] == ("python", "-u", "-m", "elastic.pool.phases.run")
    with StubPool() as pool:
        done = run(program, *command[1:], **pool.environment())
        assert done.returncode == 0, done.stderr
        pool.until(lambda stub: stub.held is None)
        said = [type(message).__name__ for message in pool.heard]
    assert said == ["JobHello", *["AskPhase", "YieldPhase", "AskPhase", "YieldPhase", "StepsDone"] * 2]
    told = json.loads(done.stdout)
    assert (told["value"], told["name"], told["file"], told["argv"][1:]) == (4, "__main__", "script.py", ["0"])
    alone = run(program, *command[1:])
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout == done.stdout
    assert run(program, *script, "0").returncode == 0


def test_a_programs_own_exit_code_is_its_own(program: Path) -> None:
    assert run(program, "-m", "elastic.pool.phases.run", "phases.toml", "script.py", "7").returncode == 7


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ('"loop:Trainer.roll" = "rollout"', "loop:Trainer.roll is not there"),
        ('"loop:Trianer.roll_out" = "rollout"', "loop:Trianer.roll_out is not there: Trianer"),
        ('"loop:Trainer" = "rollout"', "loop:Trainer is a type; allowed: a function or a method"),
        ('"pool:roll" = "rollout"', "there is no module 'pool' here"),
        ('"__main__:generate" = "rollout"', "script.py has no __main__:generate"),
        ('"json.tool:main" = "rollout"', "never there, so no phase: json.tool:main"),
        ('"loop:Trainer.forward" = {phase = "rollout", until = "loop:end"}', "loop:end is not there"),
    ],
)
def test_what_is_not_there_is_named(program: Path, phases: str, message: str) -> None:
    (program / "phases.toml").write_text(f"[phases]\n{phases}\n")
    done = run(program, "-m", "elastic.pool.phases.run", "phases.toml", "script.py", "0")
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.count("error:") == 1


def test_a_state_that_is_not_there_is_named(program: Path) -> None:
    (program / "phases.toml").write_text(
        '[phases]\n"loop:Trainer.roll_out" = {phase = "rollout", state = ["self.nets"]}'
    )
    with StubPool() as pool:
        done = run(program, "-m", "elastic.pool.phases.run", "phases.toml", "script.py", "0", **pool.environment())
    assert done.returncode == 1
    assert "PhaseError: loop:Trainer.roll_out, phase 'rollout': its state 'self.nets' is not there" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[phases", "no TOML"),
        ("", r"found nothing; allowed: a table \[phases\]"),
        ("[phase]\n'a:b' = 'rollout'", "found phase; allowed"),
        ("[phases]\n'a.b' = 'rollout'", r"found 'a.b'; allowed: module:function or module:Class.method"),
        ("[phases]\n'a:b' = 'rolout'", "phase: found 'rolout'; allowed: rollout, train, sync"),
        ("[phases]\n'a:b' = 3", "found 3; allowed: a phase, or a table of phase, until, state, both"),
        ("[phases]\n'a:b' = {phase = 'rollout', states = []}", "allowed: a phase, or a table of"),
        ("[phases]\n'a:b' = {phase = 'rollout', state = 'self.x'}", "state: found 'self.x'; allowed: a list"),
        ("[phases]\n'a:b' = {phase = 'rollout', state = ['self.x()']}", r"found 'self.x\(\)'; allowed: self.attribute"),
        ("[phases]\n'a:b' = {phase = 'rollout', both = 1}", "both: found 1; allowed: true or false"),
        ("[phases]\n'a:b' = {phase = 'rollout', until = 'c'}", "until: found 'c'; allowed: module:function"),
        ("[phases]\n'a:b' = {phase = 'sync', state = ['self.x']}", "holds no device"),
        ("[phases]\n'a:b' = 'train'", "no function is the phase 'rollout'"),
    ],
)
def test_bad_files_say_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "phases.toml"
    file.write_text(text)
    with pytest.raises(PhasesFileError, match=message):
        load_phases(file)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PhasesFileError, match="No such file"):
        load_phases(tmp_path / "nothing.toml")


def test_targets_are_what_the_file_says(program: Path) -> None:
    targets = load_phases(program / "phases.toml").targets
    assert targets[1] == PhaseTarget("loop", "Trainer.forward", "train", ("loop", "Trainer.after"), ("self.state",))
    (program / "next.toml").write_text("[phases]\n'a:b' = 'rollout'\n'a:c' = {phase = 'train', until = 'next'}")
    assert load_phases(program / "next.toml").targets[1].until == NEXT


@pytest.mark.parametrize(
    "script",
    [(), ("bash", "run.sh"), ("torchrun", "train.py"), ("python",), ("python", "-c", "pass"), ("python", "-u")],
)
def test_only_python_programs_have_a_phases_file(script: tuple[str, ...]) -> None:
    with pytest.raises(PhasesFileError, match="goes with a Python program"):
        wrapped(script, Path("phases.toml"))


def test_options_of_python_stay(tmp_path: Path) -> None:
    file = tmp_path / "phases.toml"
    command = ("/opt/bin/python3.11", "-W", "error", "-Xdev", "-m", "package.train", "-m", "3")
    assert wrapped(command, file) == (
        *("/opt/bin/python3.11", "-W", "error", "-Xdev", "-m", "elastic.pool.phases.run", str(file)),
        *("-m", "package.train", "-m", "3"),
    )


SOURCES = {
    "train.py": """
import lib.loop as loop
if True:
    def roll(): ...
class Job(loop.Base):
    async def update(self): ...
alias = loop.helper
""",
    "lib/__init__.py": "from .loop import *\nfrom json import dumps as told",
    "lib/loop.py": """
class Base:
    def own(self): ...
class Far(Base): ...
try:
    fast = 1
except ImportError:
    def slow(): ...
""",
    "broken.py": "def (",
}


@pytest.mark.parametrize(
    ("named", "missing"),
    [
        ("__main__:roll", False),
        ("__main__:Job.update", False),
        ("__main__:Job.own", True),
        ("__main__:alias", True),
        ("__main__:nothing", True),
        ("train:alias", False),
        ("lib.loop:Base.own", False),
        ("lib.loop:Base.other", True),
        ("lib.loop:Far.own", False),
        ("lib.loop:fast", False),
        ("lib.loop:slow", False),
        ("lib.loop:Base", False),
        ("lib.loop:gone", True),
        ("lib:told", False),
        ("lib:dumps", False),
        ("broken:any", False),
        ("elsewhere:any", False),
    ],
)
def test_what_sources_beside_the_program_have_not_is_known_before_it_runs(
    tmp_path: Path, named: str, missing: bool
) -> None:
    (tmp_path / "lib").mkdir()
    for name, text in SOURCES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "phases.toml").write_text(f'[phases]\n"{named}" = "rollout"\n')
    file = load_phases(tmp_path / "phases.toml")
    for script in (("python", "-u", "train.py", "x"), ("python", "-m", "train")):
        if missing:
            with pytest.raises(PhasesFileError, match=f"has no {named}"):
                check_sources(file, script, tmp_path)
        else:
            check_sources(file, script, tmp_path)
    check_sources(file, ("python", "-P", "train.py"), tmp_path)
    check_sources(file, ("python", "-m", "installed"), tmp_path)
