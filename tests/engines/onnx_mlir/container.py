"""A stand-in for podman and docker: records its arguments, checks the mount, and runs the command on this machine.

What a container would see at the mounted folder it sees by that name in a folder of its own, `STANDIN_ROOT`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    root = Path(os.environ["STANDIN_ROOT"])
    with (root / "calls").open("a") as file:
        file.write(json.dumps(argv) + "\n")
    while argv and argv[0] in ("--host", "--url"):
        argv = argv[2:]
    if argv[:2] == ["image", "inspect"]:
        held = root / "image"
        print(held.read_text() if held.exists() else "", end="")
        return 0 if held.exists() else 1
    if argv[0] == "pull":
        if "nowhere" in argv[1]:
            print("Error: no such image in any registry", file=sys.stderr)
            return 125
        (root / "image").write_text("sha256:1234\n")
        return 0
    if argv[0] == "kill":
        (root / "killed").write_text(argv[1])
        return 0
    return run(argv, root)


def run(argv: list[str], root: Path) -> int:
    mounts = [argv[i + 1] for i, word in enumerate(argv) if word == "-v"]
    host, inside, mode = mounts[-1].split(":")
    assert mode == "rw", mounts
    assert argv[argv.index("--entrypoint") + 1] == "sh", argv
    script = argv[-1]
    assert argv[-2] == "-c", argv
    for seen, real in json.loads(os.environ.get("STANDIN_HOST", "{}")).items():  # what the daemon's host has there
        if host.startswith(seen):
            host = real + host.removeprefix(seen)
    if not Path(host).is_dir():
        host = str(root / "empty")  # as docker makes an empty folder
        Path(host).mkdir(exist_ok=True)
    place = root / "view"
    place.unlink(missing_ok=True)
    place.symlink_to(host)
    environment = {**os.environ, "PATH": f"{root}/bin:{os.environ['PATH']}"}
    return subprocess.run(["sh", "-c", script.replace(inside, str(place))], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
