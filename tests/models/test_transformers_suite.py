"""Transformers' own common tests of models, from the source archive of the installed version."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import transformers

SUITE = Path(__file__).with_name("transformers_suite.py")
ROOT = Path(__file__).parents[2]
MISSING = {  # modules that the common tests import and the archive lacks
    "exporters/test_export.py": "class ExportTesterMixin: pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin: pass\n",
}


def pip(*words):
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip {words[0]} failed: {done.stderr[-300:]}")


@pytest.mark.slow
def test_the_common_tests_of_transformers_pass(tmp_path):
    name = f"transformers-{transformers.__version__}"
    only = ("--no-deps", "--no-binary", ":all:", "--dest", str(tmp_path))
    pip("download", *only, f"transformers=={transformers.__version__}")
    pip("install", "--no-deps", "--target", str(tmp_path / "packages"), "parameterized")
    with tarfile.open(tmp_path / f"{name}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    tests = tmp_path / name / "tests"
    for file, text in MISSING.items():
        assert not (tests / file).exists(), f"the archive now has {file}: use it"
        (tests / file).parent.mkdir()
        (tests / file).write_text(text)
    (tests / "test_hypermlp.py").write_text(SUITE.read_text())

    paths = [str(ROOT), str(tests.parent), str(tmp_path / "packages")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "RUN_SLOW": "1"}
    command = [sys.executable, "-m", "pytest", "-rf", "-p", "no:cacheprovider", "tests/test_hypermlp.py"]
    done = subprocess.run(command, cwd=tests.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    print(done.stdout.splitlines()[-1])
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 70  # 77 with transformers 5.22.2
