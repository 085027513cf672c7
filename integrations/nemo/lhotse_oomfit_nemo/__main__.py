"""``python -m lhotse_oomfit_nemo SCRIPT ...`` runs a NeMo script with the plugin, where it isn't installed.

Lightning finds plugins by the metadata that an installation leaves behind. With the two packages merely on
``PYTHONPATH``, as in a container that may not be changed, there is none. This writes some into a folder of its own
and puts that on the path: of this process, and of the ranks that it starts.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

GROUP = "lightning.pytorch.callbacks_factory"
ENTRY = "lhotse_oomfit_nemo.plugin:callbacks"


def main() -> None:
    """Run the script that the first argument names, as ``python SCRIPT`` would."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit("usage: python -m lhotse_oomfit_nemo SCRIPT [the script's own arguments]")
    script = Path(sys.argv[1])
    if not script.is_file():
        sys.exit(f"lhotse_oomfit_nemo: {script} must be a Python script, there is no such file")
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.resolve().parent)
    if any(entry.value == ENTRY for entry in entry_points(group=GROUP)):
        runpy.run_path(str(script), run_name="__main__")
        return
    with tempfile.TemporaryDirectory(prefix="lhotse_oomfit_nemo_") as folder:
        _write_metadata(Path(folder))
        _put_on_path([folder, *_homes()])
        runpy.run_path(str(script), run_name="__main__")


def _write_metadata(folder: Path) -> None:
    metadata = folder / "lhotse_oomfit_nemo-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lhotse-oomfit-nemo\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\nlhotse_oomfit_nemo = {ENTRY}\n")


def _homes() -> list[str]:
    """Where this package and the core lie, which may be the working folder of this process only."""
    import lhotse_oomfit

    return [str(Path(package).resolve().parents[1]) for package in (__file__, lhotse_oomfit.__file__)]


def _put_on_path(folders: list[str]) -> None:
    sys.path += folders
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*([before] if before else []), *folders])


if __name__ == "__main__":
    main()
