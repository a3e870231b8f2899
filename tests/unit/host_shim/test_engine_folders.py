"""The folders of engines' own file tiers: found in configurations and flags, and judged by their place."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from host_shim import engine_check, engine_folders
from host_shim.engine_check import Place, configuration_findings, read_document
from host_shim.engine_folders import Folder, Found, folders_of, judge_folder, judge_memory, memory_of

VLLM = {
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 1 << 40,
        "secondary_tiers": [{"type": "fs", "root_dir": "FOLDER", "locality": "REMOTE"}],
    }
}
CONFIGURED = {
    "vllm": f"vllm serve MODEL --kv-transfer-config '{json.dumps(VLLM)}'",
    "lmcache": "--l1-size-gb 1024 --l2-adapter '"
    '{"type": "fs", "base_path": "FOLDER", "use_odirect": true}\'',
    "sglang": "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=FOLDER python -m sglang.launch_server "
    "--hicache-storage-backend=file --hicache-size 1024",
    "llama-cpp": "llama-server -m model.gguf --slot-save-path FOLDER/",
    "nixl": "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR=FOLDER python -m sglang.launch_server",
}


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The faces of a pool with one shared volume; pages are not checked there."""
    for folder in ("kv/kv", "fs", "shared/all", ".g35"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(
        engine_folders,
        "judge_page",
        lambda what, path, *, is_direct: Found(what, True, f"{path} {is_direct}"),
    )
    return tmp_path


def findings(engine: str, folder: Path | str, mount: Path) -> list[Found]:
    given = CONFIGURED[engine].replace("FOLDER", str(folder))
    return list(configuration_findings(engine, given, Place(str(mount), "kv"), is_mounted=True))


@pytest.mark.parametrize("engine", CONFIGURED)
def test_a_folder_of_a_shared_volume_is_well(engine: str, mount: Path) -> None:
    first, *_ = findings(engine, mount / "shared/all/blocks", mount)
    assert first.good
    assert first.detail == f"{mount}/shared/all/blocks {engine in ('vllm', 'lmcache')}"


@pytest.mark.parametrize("engine", CONFIGURED)
@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("kv/kv", "/kv, which has no folders"),
        (".g35", "/.g35, which has no folders"),
        ("", "the mount itself"),
        ("shared", "no volume is named"),
        ("shared/al/x", "the shared volume al is not there"),
        ("../elsewhere", "is not in the mount"),
        ("fs/blocks", "one agent's own"),
    ],
)
def test_a_folder_on_the_wrong_face_is_told_the_right_one(
    engine: str, folder: str, said: str, mount: Path
) -> None:
    found, *_ = findings(engine, mount / folder, mount)
    if engine == "nixl" and folder.startswith("fs"):
        assert found.good, "a program may have files of its own there"
        return
    assert not found.good
    assert not found.minor
    assert said in found.detail
    assert f"{mount}/shared/all/{engine}" in found.advice


def test_fs_is_well_in_a_pool_without_a_shared_volume(mount: Path) -> None:
    (mount / "shared/all").rmdir()
    (found,) = judge_folder("vllm", Folder("root_dir", f"{mount}/fs/x"), str(mount))
    assert found.good
    (found,) = judge_folder("vllm", Folder("root_dir", f"{mount}/kv/kv"), str(mount))
    assert 'kind = "shared"' in found.advice


@pytest.mark.parametrize(
    ("engine", "name"), [("vllm", "cpu_bytes_to_use"), ("lmcache", "l1_size_gb"), ("sglang", "hicache_size")]
)
def test_a_tier_in_memory_that_is_larger_than_the_volume_is_said(
    engine: str, name: str, mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_check, "room_of", lambda _path: 64 << 30)
    *_, found = findings(engine, mount / "shared/all/x", mount)
    assert (found.name, found.good, found.minor) == (name, False, True)
    assert "never asks the pool" in found.detail
    monkeypatch.setattr(engine_check, "room_of", lambda _path: 4 << 40)
    assert all(each.good for each in findings(engine, mount / "shared/all/x", mount))


def test_a_size_that_is_none_is_left_alone() -> None:
    for size in ("auto", True, None, float("inf"), "1e999", -5, [1], 10**400):
        assert memory_of("vllm", {"cpu_bytes_to_use": size}) == []
    assert judge_memory("it", 5 << 30, 0, "a volume of which nobody knows") is None


def test_our_connector_beside_files_of_the_same_pool_is_twice(mount: Path) -> None:
    ours = {"type": "G35Tier", "module_path": "host_shim.vllm_tier", "mount": str(mount), "volume": "kv"}
    given = json.dumps([ours, {"type": "fs", "root_dir": f"{mount}/shared/all/x"}])
    found = list(configuration_findings("vllm", given, Place(str(mount), "kv"), is_mounted=True))
    assert [each.name for each in found] == ["options", "root_dir", "tiers"]
    assert found[-1].minor
    assert "twice" in found[-1].detail


def test_every_way_in_which_lmcache_names_a_folder() -> None:
    document = {"remote_url": "fs://host:0/mnt/a", "local_disk": "file:///mnt/b", "max_local_disk_size": 5}
    document_of_the_adapter = {"type": "fs", "base_path": "/mnt/c", "max_capacity_gb": 3}
    assert folders_of("lmcache", [document, document_of_the_adapter]) == [
        Folder("remote_url", "/mnt/a"), Folder("local_disk", "/mnt/b"),
        Folder("base_path", "/mnt/c", keeps_count=True),
    ]  # fmt: skip
    assert folders_of("lmcache", {"remote_url": "redis://host", "base_path": "/mnt/of-something-else"}) == []


def test_lmcaches_fs_connector_names_its_folders_by_its_instances() -> None:
    document: dict[str, Any] = {
        "remote_storage_plugins": ["fs.one", "fs"],
        "extra_config": {
            "remote_storage_plugin.fs.one.base_path": "/mnt/a, /mnt/b",
            "remote_storage_plugin.fs.base_path": "/mnt/c",
            "remote_storage_plugin.other.base_path": "/mnt/d",
            "fs_connector_use_odirect": True,
            "save_chunk_meta": False,
        },
    }
    assert [(each.path, each.is_direct, each.is_undirected) for each in folders_of("lmcache", document)] == [
        ("/mnt/a", True, False), ("/mnt/b", True, False), ("/mnt/c", True, False)
    ]  # fmt: skip
    del document["extra_config"]["save_chunk_meta"]
    assert {(each.is_direct, each.is_undirected) for each in folders_of("lmcache", document)} == {
        (False, True)
    }
    assert folders_of("lmcache", {"fs_base_path": "/mnt/e"}) == [Folder("fs_base_path", "/mnt/e")]


@pytest.mark.parametrize(("face", "good"), [("shared/all/lmcache", True), ("fs/lmcache", False)])
def test_lmcaches_fs_connector_is_judged_as_the_docs_have_it(face: str, good: bool, mount: Path) -> None:
    extra = {"remote_storage_plugin.fs.base_path": f"{mount}/{face}"}
    document = json.dumps({"remote_storage_plugins": ["fs"], "extra_config": extra})
    for given in (document, f"LMCACHE_EXTRA_CONFIG='{json.dumps(extra)}' vllm serve M"):
        (found,) = configuration_findings("lmcache", given, Place(str(mount), "kv"), is_mounted=True)
        assert (found.name, found.good) == ("remote_storage_plugin.fs.base_path", good)
        assert good or f"{mount}/shared/all/lmcache" in found.advice


def test_o_direct_that_another_option_keeps_off_is_said(mount: Path) -> None:
    folder = Folder("base_path", f"{mount}/shared/all/x", is_undirected=True)
    first, second = judge_folder("lmcache", folder, str(mount))
    assert (first.minor, second.good) == (True, True)
    assert "save_chunk_meta" in first.advice


@pytest.mark.parametrize("path", ["blocks", "./blocks", "~/blocks"])
def test_a_relative_folder_is_no_place_that_anybody_knows(path: str, mount: Path) -> None:
    (found,) = judge_folder("lmcache", Folder("base_path", path), str(mount))
    assert not found.good
    assert "is relative" in found.detail
    assert f"{mount}/shared/all/lmcache" in found.advice


@pytest.mark.parametrize(
    ("face", "said"), [("shared/all/x", "one process's own"), ("kv/kv", "has no folders"), ("fs/x", "")]
)
def test_kvbms_one_file_belongs_on_fs(face: str, said: str, mount: Path) -> None:
    given = f"DYN_KVBM_DISK_CACHE_DIR={mount}/{face} DYN_KVBM_DISK_CACHE_GB=64"
    (found,) = configuration_findings("nixl", given, Place(str(mount), "kv"), is_mounted=True)
    assert found.good is not bool(said)
    assert said in found.detail
    assert found.good or found.advice == f"DYN_KVBM_DISK_CACHE_DIR: {mount}/fs"


def test_kvbm_in_a_pool_without_files_is_told_what_makes_them(mount: Path) -> None:
    (mount / "fs").rmdir()
    (found,) = judge_folder("nixl", Folder("it", f"{mount}/shared/all", is_own=True), str(mount))
    assert "volume of kind files" in found.advice


@pytest.mark.parametrize(
    "given",
    [
        "export X=/mnt/x; python -m it", "export X=/mnt/x;python -m it", "export X=/mnt/x && python -m it",
        "env X=/mnt/x python -m it", "X='/mnt/x' python --y;", "Y=1 X=/mnt/x|cat",
    ],
)  # fmt: skip
def test_a_shells_line_ends_where_the_shell_ends_it(given: str) -> None:
    assert read_document(given)["X"] == "/mnt/x"


def test_lmcache_that_evicts_by_itself_is_told_not_to(mount: Path) -> None:
    folder = Folder("base_path", f"{mount}/shared/all/x", keeps_count=True)
    first, second = judge_folder("lmcache", folder, str(mount))
    assert (first.minor, second.good) == (True, True)
    assert "max_capacity_gb at 0" in first.advice


def test_flags_are_read_as_a_shell_reads_them() -> None:
    said = "A=1 vllm serve M --x-y=5 --on --list '[1]' --list '[2]' --name n"
    assert read_document(said) == {"A": "1", "x_y": "5", "on": True, "list": [[1], [2]], "name": "n"}
    assert read_document("--x 'a;b' --url http://h/?a#b") == {"x": "a;b", "url": "http://h/?a#b"}
    assert read_document('{"a": "b --c"}') == {"a": "b --c"}


@pytest.mark.parametrize("given", ["--x '", "--kv-transfer-config '{'", "", "[" * 3, "no-such-file"])
def test_what_cannot_be_read_is_a_finding(given: str, mount: Path) -> None:
    (found,) = configuration_findings("vllm", given, Place(str(mount), "kv"), is_mounted=True)
    assert (found.name, found.good) == ("options", False)
    assert "docs/engines/vllm.md" in found.advice


@pytest.mark.parametrize("engine", ["nixl", "llama-cpp"])
def test_an_engine_of_files_without_a_folder_is_said(engine: str, mount: Path) -> None:
    (found,) = configuration_findings(engine, "--x y", Place(str(mount), "kv"), is_mounted=True)
    assert found.detail == "nothing there names a folder of files"


def test_a_page_is_written_where_the_folder_will_be(tmp_path: Path) -> None:
    found = engine_folders.judge_page("root_dir", str(tmp_path / "not/yet"), is_direct=False)
    assert found.good, found.detail
    assert not list(tmp_path.iterdir())


def test_what_o_direct_wants_is_said_where_no_option_tells_the_size_of_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_folders.os, "O_DIRECT", 0)
    found = engine_folders.judge_page("base_path", str(tmp_path), is_direct=True)
    assert f"a multiple of {os.statvfs(tmp_path).f_bsize} bytes" in found.detail


def test_a_folder_that_the_user_may_not_write_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(engine_folders.os, "open", refused)
    found = engine_folders.judge_page("root_dir", str(tmp_path), is_direct=True)
    assert not found.good
    assert "Permission denied" in found.detail
    assert "chown" in found.advice
