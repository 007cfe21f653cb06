"""Carries out a Dockerfile with no Docker engine: each RUN line, as the file has it, in a mount namespace of its own.

In place of the base image stands this machine, with a virtual environment that sees the packages of the tests. The
folders that an image build writes to (`PRIVATE`) are private ones, mounted over the machine's; all else is read-only
while a RUN line runs. Every stage has private folders of its own, so `COPY --from` and `RUN --mount` work.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from dockerfile_parse import DockerfileParser

PRIVATE = ("/etc", "/mnt", "/opt", "/var/cache")
VENV = "/opt/base-image"
BIND = re.compile(r"--mount=type=bind,from=([^,]+),source=([^,]+),target=(\S+)\s+(.*)", re.DOTALL)


@dataclass
class Stage:
    """One FROM and what became of it."""

    root: Path
    """Holds the private folders."""
    arguments: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    directory: str = "/"
    user: str = "0:0"
    labels: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)

    def inside(self, path: str) -> Path:
        """Where an absolute path of the image lies on this machine."""
        top = next((top for top in PRIVATE if path == top or path.startswith(f"{top}/")), None)
        assert top, f"{path} is under none of {', '.join(PRIVATE)}, so it can't be written in a scratch build"
        return self.root / top[1:].replace("/", "_") / path[len(top) :].lstrip("/")

    def expand(self, text: str) -> str:
        """Put in the values of ``${NAME}``, as Docker does outside of RUN."""
        return re.sub(r"\$\{(\w+)\}", lambda match: (self.arguments | self.environment)[match[1]], text)


class Build:
    """Runs a Dockerfile; an instruction that it doesn't know is an AttributeError.

    Args:
        dockerfile: the file.
        context: what COPY copies from.
        scratch: an empty folder.
        build_arguments: as of `docker build --build-arg`.
    """

    def __init__(self, *, dockerfile: Path, context: Path, scratch: Path, build_arguments: dict[str, str]) -> None:
        self._context, self._scratch, self._build_arguments = context, scratch, build_arguments
        self._stages: dict[str, Stage] = {}
        self._global: dict[str, str] = {}
        self.commands: list[str] = []
        """The RUN lines that ran."""
        with dockerfile.open("rb") as file:
            steps = DockerfileParser(fileobj=file).structure
        for step in steps:
            if step["instruction"] != "COMMENT":
                getattr(self, f"_{step['instruction'].lower()}")(step["value"])

    @property
    def image(self) -> Stage:
        """The last stage."""
        return list(self._stages.values())[-1]

    def run(self, command: list[str], *, stage: Stage | None = None, binds: dict[str, Path] | None = None) -> str:
        """Output of a command in a stage.

        Args:
            command: and its arguments.
            stage: the last one by default.
            binds: absolute path to the folder that is to be seen there.

        Raises:
            AssertionError: it failed.
        """
        stage = stage or self.image
        mounts = {top: stage.inside(top) for top in PRIVATE} | (binds or {})
        script = [
            "set -euo pipefail",
            'mount --bind "$SCRATCH" "$SCRATCH"',
            "mount -o remount,ro,bind /",
            *(f"mount --bind {shlex.quote(str(path))} {shlex.quote(top)}" for top, path in mounts.items()),
            f"cd {shlex.quote(stage.directory)}",
            'exec "$@"',
        ]
        environment = {"LANG": "C.UTF-8", "PATH": f"{VENV}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
        environment |= {"SCRATCH": str(self._scratch), "TMPDIR": str(self._scratch), "HOME": "/mnt"}
        done = subprocess.run(
            ["unshare", "--mount", "--map-root-user", "bash", "-c", "\n".join(script), "scratch", *command],
            env=environment | stage.arguments | stage.environment,
            capture_output=True,
            text=True,
            timeout=540,
        )
        output = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        assert done.returncode == 0, f"{command} ended with exit code {done.returncode}:\n{output}"
        return done.stdout

    def _arg(self, value: str) -> None:
        name, _, default = value.partition("=")
        scope = self.image.arguments if self._stages else self._global
        scope[name] = self._build_arguments.get(
            name, shlex.split(default)[0] if default else self._global.get(name, "")
        )

    def _from(self, value: str) -> None:
        words = value.split()
        assert re.fullmatch(r"\$\{(\w+)\}", words[0]) and words[0][2:-1] in self._global, f"FROM {value} is no argument"
        name = words[2] if len(words) == 3 else str(len(self._stages))
        stage = self._stages[name] = Stage(self._scratch / name)
        for top in PRIVATE:
            stage.inside(top).mkdir(parents=True)
        _copy_etc(stage.inside("/etc"))
        _make_base(stage.inside(VENV))

    def _workdir(self, value: str) -> None:
        self.image.directory = self.image.expand(value)
        self.image.inside(self.image.directory).mkdir(parents=True, exist_ok=True)

    def _copy(self, value: str) -> None:
        *sources, target = value.split()
        assert not sources[0].startswith("--"), f"COPY {value}: options aren't carried out here"
        folder = self.image.inside(str(Path(self.image.directory, target)))
        for source in sources:
            path = self._context / source
            if path.is_dir():  # its content, as Docker does
                shutil.copytree(path, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                destination = folder / path.name if target.endswith("/") else folder
                destination.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, destination)

    def _run(self, value: str) -> None:
        binds = {}
        while match := BIND.fullmatch(value):
            name, source, target, value = match.groups()
            self.image.inside(target).mkdir(parents=True, exist_ok=True)
            binds[target] = self._stages[name].inside(source)
        assert not value.startswith("--"), f"RUN {value}: this option isn't carried out here"
        self.run([*self.image.shell, value], binds=binds)
        self.commands.append(value)

    def _env(self, value: str) -> None:
        for pair in shlex.split(value):
            name, _, text = pair.partition("=")
            self.image.environment[name] = self.image.expand(text)

    def _label(self, value: str) -> None:
        self.image.labels |= dict(pair.split("=", 1) for pair in shlex.split(self.image.expand(value)))

    def _shell(self, value: str) -> None:
        self.image.shell = json.loads(value)

    def _user(self, value: str) -> None:
        self.image.user = value

    def _expose(self, value: str) -> None:
        assert value.isdigit()

    def _entrypoint(self, value: str) -> None:
        self.image.entrypoint = json.loads(value)


def _copy_etc(folder: Path) -> None:
    def unreadable(directory: str, names: list[str]) -> set[str]:
        paths = {name: Path(directory, name) for name in names}
        return {name for name, path in paths.items() if not (path.is_symlink() or os.access(path, os.R_OK))}

    shutil.copytree("/etc", folder, symlinks=True, dirs_exist_ok=True, ignore=unreadable)


def _make_base(folder: Path) -> None:
    """A virtual environment that sees the packages of the running one, and puts its own before them."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (own,) = folder.glob("lib/python*/site-packages")
    packages = sysconfig.get_path("purelib")
    # addsitedir also reads the .pth files there, which a plain path would not.
    (own / "base.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
