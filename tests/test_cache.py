"""One root for everything that is cached: HYPERMLP_CACHE, or a folder in the user's cache."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from hypermlp.cache import cache_directory
from hypermlp.errors import UserError
from hypermlp.ops import build
from hypermlp.train.data import prepare
from hypermlp.train.recipe import DataSettings


@pytest.fixture(params=["HYPERMLP_CACHE", "XDG_CACHE_HOME"])
def cache(request, tmp_path, monkeypatch):
    """The variable that is set, and the root that follows from it."""
    monkeypatch.delenv("HYPERMLP_CACHE", raising=False)
    monkeypatch.setenv(request.param, str(tmp_path / "cache"))
    return request.param, tmp_path / "cache" / ("" if request.param == "HYPERMLP_CACHE" else "hypermlp")


@pytest.fixture
def settings(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(4):
        (corpus / f"{i}.txt").write_text(f"document {i} " * 40)
    return DataSettings(source=str(corpus), context=8, validation=0.25)


def test_the_default_is_in_the_users_cache(monkeypatch):
    for name in ("HYPERMLP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_directory() == Path.home() / ".cache" / "hypermlp"


def test_kernels_and_data_have_one_root(cache, settings):
    _, root = cache
    assert cache_directory() == root
    assert build.library_path().parent == root / "kernels"
    assert prepare(settings).folder.parent == root / "data"


def test_data_of_earlier_revisions_is_found(cache, settings, tmp_path):
    _, root = cache
    folder = prepare(settings).folder
    earlier = tmp_path / "cache" / "hypermlp-data" / folder.name  # the same for both variables
    earlier.parent.mkdir()
    shutil.move(folder, earlier)
    assert prepare(settings).folder == earlier
    assert not [path for path in (root / "data").iterdir() if path.is_dir()]


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERMLP_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True, mode=0o755)
    return folder


def test_a_cache_of_another_user_is_refused(kernels, monkeypatch):
    assert build.library_path().parent == kernels
    monkeypatch.setattr(os, "getuid", lambda: kernels.stat().st_uid + 1)
    if kernels.stat().st_uid == 0:  # root's folders are trusted
        os.chown(kernels, 12345, -1)
    with pytest.raises(
        build.BuildError, match=r"belongs to user \d+, .*name a folder of your own in HYPERMLP"
    ):
        build.library_path()


@pytest.mark.parametrize("which", ["kernels", "root"])
def test_a_cache_that_others_can_write_to_is_refused(kernels, which):
    folder = kernels if which == "kernels" else kernels.parent
    folder.chmod(0o777)
    with pytest.raises(build.BuildError, match=f"{folder} can be written by other users, .*chmod go-w"):
        build.build(quiet=True)
    if which == "root":
        folder.chmod(0o1777)  # like /tmp
        assert build.library_path().parent == kernels


def test_a_lock_that_is_a_link_is_not_followed(kernels, tmp_path):
    (tmp_path / "precious").write_text("content")
    lock = build.library_path().with_suffix(".lock")
    lock.symlink_to(tmp_path / "precious")
    with pytest.raises(build.BuildError, match="cannot write to the cache"):
        build.build(quiet=True)
    assert (tmp_path / "precious").read_text() == "content"


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="the system has no owners of files")
def test_data_in_a_cache_that_others_can_write_to_is_refused(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERMLP_CACHE", str(tmp_path / "cache"))
    folder = prepare(settings).folder
    folder.parent.chmod(0o777)
    with pytest.raises(UserError, match="can be written by other users, who could put data there"):
        prepare(settings)
    shared = dataclasses.replace(settings, cache=str(folder.parent))  # the user chose it
    assert prepare(shared).folder == folder
