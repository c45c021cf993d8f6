"""List the files of the project: those in git, or all files outside of a checkout."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_MADE_BY_TOOLS = ("build", "dist")


def files() -> set[str]:
    """Paths relative to the root, with forward slashes."""
    if (ROOT / ".git").exists():
        try:
            listed = subprocess.run(
                ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True, timeout=60
            )
        except (OSError, subprocess.SubprocessError):
            pass
        else:
            return {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if not _is_made(path)}


def _is_made(path: Path) -> bool:
    folders = path.parts[:-1]
    if folders[:1] == ("studies",) and (path.suffix != ".py" and "landscapes" not in folders):
        return True
    return any(
        part in _MADE_BY_TOOLS or part == "__pycache__" or part.endswith(".egg-info") or part in (".git", ".venv")
        for part in folders
    ) or any(part.startswith(".") and part != ".ci" for part in folders)
