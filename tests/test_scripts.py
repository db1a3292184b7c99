"""launch/*.sh with stand-ins for Python and nvidia-smi: what is installed, when, in which order, and what goes wrong how."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# logs what it is asked to do; $FAKE_* say how it misbehaves; `-m venv` copies it into the environment
FAKE_PYTHON = r"""#!/bin/bash
case "$*" in
    "-c import sys"*) exit "${FAKE_OLD:-0}" ;;
    --version) echo "Python 3.9.1" ;;
    "-m venv"*) [ -z "${FAKE_NO_VENV:-}" ] || exit 1; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    "-m pip --version") exit 0 ;;
    "-m pip"*) echo "${*:3}" >>"$FAKE_LOG"; sleep "${FAKE_SLEEP:-0}"; [[ -z "${FAKE_FAIL:-}" || "$*" != *"$FAKE_FAIL"* ]] ;;
    *"device_count"*) echo "${FAKE_GPUS:-0}" ;;
    *) echo "run: $*" >>"$FAKE_LOG" ;;
esac
"""


class Repository:
    """A copy of the scripts in a folder with a blank in its name, run from elsewhere with stand-ins first on PATH."""

    def __init__(self, folder: Path):
        self.root, self.bin, self.log = folder / "my copy", folder / "bin", folder / "log"
        shutil.copytree(ROOT / "launch", self.root / "launch")
        shutil.copytree(ROOT / "csrc", self.root / "csrc")
        shutil.copy(ROOT / "setup.py", self.root)
        self.bin.mkdir()
        self.put("python3", FAKE_PYTHON)
        self.put("nvidia-smi", "#!/bin/bash\nexit 9\n")
        self.env = {"PATH": f"{self.bin}:/usr/bin:/bin", "FAKE_LOG": str(self.log)}

    def put(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, script: str, *options: str, **env: str) -> subprocess.CompletedProcess:
        return subprocess.run(["bash", str(self.root / "launch" / script), *options], cwd=self.bin, env=self.env | env,
                              capture_output=True, text=True, timeout=30)

    def done(self) -> list[str]:
        """What was asked of Python so far; forgotten afterwards."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path)


def test_a_cpu_build_of_torch_comes_first_and_the_second_run_installs_nothing(repository):
    assert repository.run("setup.sh").returncode == 0
    torch, rest = repository.done()
    assert torch.startswith("install -q torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu --retries 0 --timeout")
    assert rest == f"install -q -e {repository.root}[dev]"
    again = repository.run("setup.sh")
    assert (again.returncode, again.stderr, repository.done()) == (0, "", [])


def test_without_that_index_pip_finds_torch_under_the_same_version(repository):
    assert repository.run("setup.sh", FAKE_FAIL="+cpu").returncode == 0
    assert repository.done()[1] == "install -q torch==2.13.0"


def test_a_machine_with_a_gpu_gets_the_default_build(repository):
    repository.put("nvidia-smi", "#!/bin/bash\nexit 0\n")
    assert repository.run("setup.sh").returncode == 0
    assert repository.done()[0] == "install -q torch==2.13.0"


@pytest.mark.parametrize("failing", ["torch==2.13.0", "[dev]"])
def test_a_set_up_that_failed_is_done_again(failing, repository):
    failed = repository.run("test.sh", FAKE_FAIL=failing)
    assert failed.returncode == 1 and failed.stderr.splitlines()[-1].startswith("error: pip could not install")
    assert not any(line.startswith("run:") for line in repository.done())
    assert repository.run("test.sh").returncode == 0
    assert [line.split()[0] for line in repository.done()] == ["install", "install", "run:"]


@pytest.mark.parametrize("file", ["setup.py", "csrc/rows.h"])
def test_a_change_of_what_is_installed_is_installed_even_if_it_is_taken_back_half_way(repository, file):
    repository.run("setup.sh")
    setup = repository.root / file
    former = setup.read_text()
    setup.write_text(former + "# changed\n")
    assert repository.run("setup.sh", FAKE_FAIL="[dev]").returncode == 1
    setup.write_text(former)
    repository.done()
    assert repository.run("setup.sh").returncode == 0 and len(repository.done()) == 2


def test_two_at_once_set_up_once(repository):
    command = ["bash", str(repository.root / "launch" / "setup.sh")]
    both = [subprocess.Popen(command, env=repository.env | {"FAKE_SLEEP": "0.3"}, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(timeout=30) for process in both] == [0, 0]
    assert len(repository.done()) == (2 if shutil.which("flock") else 4)


def test_the_lock_ends_with_the_set_up(repository):
    """A run that lasts for hours holds up no other command."""
    repository.put("python3", FAKE_PYTHON.replace('*) echo "run', '*) [ -z "${FAKE_STAY:-}" ] || sleep 60; echo "run'))
    long = subprocess.Popen(["bash", str(repository.root / "launch" / "quickstart.sh")], env=repository.env | {"FAKE_STAY": "1"},
                            stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while not (repository.root / ".venv" / ".toolr0-ready").exists():
            time.sleep(0.05)
        (repository.root / "setup.py").write_text("# changed\n")
        assert repository.run("setup.sh").returncode == 0
    finally:
        os.killpg(long.pid, 9)
        long.wait()


def test_old_and_missing_pythons_are_one_line(repository):
    for python in [p for p in map("python3.{}".format, range(11, 15)) if shutil.which(p, path="/usr/bin:/bin")]:
        repository.put(python, "#!/bin/bash\nexit 1\n")
    old = repository.run("setup.sh", FAKE_OLD="1")
    assert old.returncode == 1 and "error: python3 is Python 3.9.1; install Python 3.11 or newer" in old.stderr
    gone = repository.run("setup.sh", PYTHON_BASE="/no/python")
    assert gone.returncode == 1 and "error: /no/python is missing; install Python 3.11" in gone.stderr
    assert not (repository.root / ".venv").exists() and not repository.done()


def test_a_newer_python_beside_an_old_one_is_found(repository):
    repository.put("python3", FAKE_PYTHON.replace('exit "${FAKE_OLD:-0}"', "exit 1"))
    repository.put("python3.14", FAKE_PYTHON)
    assert repository.run("setup.sh").returncode == 0 and len(repository.done()) == 2


def test_a_python_without_venv_is_one_line_and_leaves_nothing_that_looks_done(repository):
    failed = repository.run("setup.sh", FAKE_NO_VENV="1")
    assert failed.returncode == 1 and "apt-get install python3-venv" in failed.stderr.splitlines()[-1]
    assert repository.run("setup.sh").returncode == 0 and len(repository.done()) == 2


def test_an_environment_of_an_old_python_is_named(repository):
    (repository.root / ".venv" / "bin").mkdir(parents=True)
    (repository.root / ".venv" / "bin" / "python").write_text(FAKE_PYTHON.replace('exit "${FAKE_OLD:-0}"', "exit 1"))
    (repository.root / ".venv" / "bin" / "python").chmod(0o755)
    failed = repository.run("setup.sh")
    assert failed.returncode == 1 and ".venv holds Python 3.9.1; delete that folder" in failed.stderr


@pytest.mark.parametrize("gpus, launcher", [("0", "run: launch/selfplay.py"),
                                            ("3", "run: -m torch.distributed.run --nproc_per_node=3 launch/selfplay.py")])
def test_quickstart_plays_on_what_is_there(gpus, launcher, repository):
    assert repository.run("quickstart.sh", "--seed", "1 2", FAKE_GPUS=gpus).returncode == 0
    played = repository.done()[-1]
    assert played.startswith(f"{launcher} --preset nano --out runs/nano-2") and played.endswith(" --seed 1 2")


def test_quickstart_resumes_the_newest_run(repository):
    for name in ("nano-20260101-000000", "nano-20260203-120000", "nano3", "other"):
        (repository.root / "runs" / name).mkdir(parents=True)
    assert repository.run("quickstart.sh", "--resume", "auto").returncode == 0
    assert "--out runs/nano-20260203-120000 --resume auto" in repository.done()[-1]


def test_the_tests_get_their_options(repository):
    assert repository.run("test.sh", "-m", "not slow").returncode == 0
    assert repository.done()[-1] == "run: -m pytest -m not slow"
