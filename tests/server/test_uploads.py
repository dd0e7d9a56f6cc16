"""Uploads: whole and checked or not there, and of one project alone by whatever spelling."""

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from elastic.protocol.api import AccessRole, RunPhase
from elastic.protocol.api_client import Client
from elastic.server import ids
from elastic.server.api.app import create_app
from elastic.server.intake.upload_files import SETTLED_S, UploadStorage, named
from elastic.server.store import uploads
from elastic.server.store.tables import runs
from tests.server.conftest import Site, Submission
from tests.server.test_client import url
from tests.small_files import small_files

__all__ = ["url"]
TRACE = b"time_s,event,instance_id\n0,add,a\n9,remove,a\n"


def told(**files: bytes) -> list[dict[str, Any]]:
    """The files by name (`_` for a dot, `__` for a slash), as an upload announces them."""
    names = {name: name.replace("__", "/").replace("_", ".") for name in files}
    return [
        {"path": names[name], "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    ]


def announce(client: Any, **files: bytes) -> dict[str, Any]:
    made = client.post("/v1/uploads", json={"name": "data", "files": told(**files)})
    assert made.status_code == 201, made.text
    return made.json()


def send(client: Any, upload: str, content: bytes, announced: bytes | None = None) -> Any:
    digest = hashlib.sha256(content if announced is None else announced).hexdigest()
    return client.put(f"/v1/uploads/{upload}/files/{digest}", content=content)


def until(holds: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    ends_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def left(site: Site) -> list[str]:
    """Every file that is on disk for uploads."""
    places = (site.settings.incoming, site.settings.all_uploads)
    return sorted(path.name for place in places for path in place.rglob("*") if path.is_file())


def test_it_is_there_once_all_of_it_is(site: Site, submission: Submission) -> None:
    client = site.member(AccessRole.RUNNER)
    upload = announce(client, market_csv=TRACE, deep__copy_csv=TRACE, note_txt=b"")
    assert (upload["state"], len(upload["missing"]), upload["bytes"]) == ("open", 2, 2 * len(TRACE))
    body = submission()
    body["config"]["providers"]["spot"]["trace"] = f"upload:{upload['id']}/deep/copy.csv"
    assert send(client, upload["id"], TRACE).json()["missing"] == [hashlib.sha256(b"").hexdigest()]
    assert client.post("/v1/runs", json=body).status_code == 400
    digest = upload["files"][0]["sha256"]
    assert client.get(f"/v1/uploads/{upload['id']}/files/{digest}").status_code == 404
    assert send(client, upload["id"], b"").json()["state"] == "ready"
    assert send(client, upload["id"], TRACE).json()["state"] == "ready"
    assert client.get(f"/v1/uploads/{upload['id']}/files/{digest}").content == TRACE
    part = client.get(f"/v1/uploads/{upload['id']}/files/{digest}", headers={"range": "bytes=2-5"})
    assert (part.status_code, part.content) == (206, TRACE[2:6])
    for said, status in (("bytes=5-2", 400), ("bytes=x", 400), ("lines=1-2", 400), ("bytes=99-", 416)):
        refused = client.get(f"/v1/uploads/{upload['id']}/files/{digest}", headers={"range": said})
        assert (refused.status_code, refused.headers["content-type"]) == (status, "application/problem+json"), said
        assert "content-disposition" not in refused.headers
    assert refused.headers["content-range"] == f"bytes */{len(TRACE)}"
    run = client.post("/v1/runs", json=body)
    assert run.status_code == 201, run.text
    shown = client.get(run.headers["location"]).json()["config"]
    assert shown["providers"]["spot"]["trace"] == body["config"]["providers"]["spot"]["trace"]
    with site.store.reading() as connection:
        config = json.loads(connection.execute(sa.select(runs.c.config)).scalar_one())
    kept = Path(config["providers"]["spot"]["trace"])
    assert kept.read_bytes() == TRACE
    assert kept.is_relative_to(site.settings.uploads(site.projects["ours"]).resolve())
    assert left(site) == ["copy.csv", "market.csv", "note.txt"]


def test_what_is_not_as_announced_leaves_nothing(site: Site) -> None:
    client = site.member(AccessRole.RUNNER)
    upload = announce(client, a=b"right")["id"]
    for content in (b"wrong", b"", b"righ", b"right and more", os.urandom(3 << 20)):
        answer = send(client, upload, content, b"right")
        assert (answer.status_code, answer.json()["type"]) == (400, "/problems/checksum-mismatch")
    assert send(client, upload, b"unknown").status_code == 404
    assert left(site) == []
    assert send(client, upload, b"right").json()["state"] == "ready"


def test_a_sender_that_leaves_leaves_nothing(url: str, site: Site) -> None:
    key, content = site.key("ours", AccessRole.RUNNER), b"x" * (2 << 20)
    upload = announce(site.client(key), a=content)["id"]
    head = f"PUT /v1/uploads/{upload}/files/{hashlib.sha256(content).hexdigest()} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    head += f"authorization: Bearer {key}\r\ncontent-length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as sender:
        sender.sendall(head.encode() + content[: 1 << 20])
        until(lambda: left(site) != [])
    until(lambda: left(site) == [])
    assert site.client(key).get(f"/v1/uploads/{upload}").json()["state"] == "open"


def test_a_body_may_be_large_on_its_way_to_disk_alone(site: Site) -> None:
    site.app = create_app(site.store, replace(site.settings, body_bytes_max=1_000))
    client = site.member(AccessRole.RUNNER)
    content = os.urandom(100_000)
    upload = announce(client, a=content)["id"]
    assert send(client, upload, content).json()["state"] == "ready"
    assert client.post("/v1/uploads", json={"name": "x" * 2_000, "files": []}).status_code == 413
    unauthenticated = site.client()
    del unauthenticated.headers["authorization"]
    assert send(unauthenticated, upload, content).status_code == 401


def test_a_project_has_so_much_room(site: Site) -> None:
    site.app = create_app(site.store, replace(site.settings, project_uploads_bytes_max=10))
    client = site.member(AccessRole.RUNNER)
    first = announce(client, a=b"123456")["id"]
    full = client.post("/v1/uploads", json={"name": "b", "files": told(b=b"12345")})
    assert (full.status_code, full.json()["type"]) == (409, "/problems/quota-exceeded")
    assert client.delete(f"/v1/uploads/{first}").status_code == 204
    announce(client, b=b"12345")


def test_a_full_disk_is_said_and_leaves_nothing(site: Site) -> None:
    client, content = site.member(AccessRole.RUNNER), os.urandom(5 << 20)
    upload = announce(client, a=content)["id"]
    with small_files(4 << 20):
        answer = send(client, upload, content)
    assert (answer.status_code, answer.json()["type"]) == (507, "/problems/storage-full")
    assert left(site) == []
    assert send(client, upload, content).json()["state"] == "ready"


def spellings(site: Site, upload: str) -> list[str]:
    theirs = site.projects["theirs"]
    home = site.settings.home.resolve()
    return [
        *(f"upload:{upload}", f"upload:{upload}/a", f"upload:{upload}/", f"upload:/{upload}", f"upload:./{upload}/a"),
        *(f"upload:../{theirs}/{upload}/a", f"upload:{ids.new_id(ids.UPLOAD)}", "upload:", "upload:/etc/passwd"),
        *(f"{home}/uploads/{theirs}/{upload}/a", f"../../uploads/{theirs}/{upload}/a", f"Upload:{upload}/a"),
        f"upload:{upload}\0/a",
    ]


def test_nobody_elses_by_any_spelling(site: Site, submission: Submission) -> None:
    ours, theirs = (site.member(AccessRole.ADMIN, project) for project in ("ours", "theirs"))
    upload, own = announce(theirs, a=TRACE)["id"], announce(ours, a=TRACE)["id"]
    for client, one in ((theirs, upload), (ours, own)):
        assert send(client, one, TRACE).json()["state"] == "ready"
    body = submission()
    inside = [
        f"upload:{own}/../{upload}/a",
        f"upload:{own}/../../{site.projects['theirs']}/{upload}/a",
        f"upload:{own}/..",
    ]
    for spelling in (
        *spellings(site, upload),
        *inside,
        f"upload:{own}//etc/passwd",
        f"upload:{own}/b",
        f"upload:{own}/",
    ):
        for section, key in (("model", "checkpoint"), ("providers.spot", "trace")):
            table = body = submission()
            table = body["config"]
            for part in section.split("."):
                table = table[part]
            table[key] = spelling
            assert ours.post("/v1/runs/dry-run", json=body).status_code == 400, (spelling, key)
    body["config"]["model"]["checkpoint"] = "policy"
    body["config"]["providers"]["spot"]["trace"] = f"upload:{own}/a"
    assert ours.post("/v1/runs/dry-run", json=body).status_code == 200
    link = site.settings.uploads(site.projects["ours"]) / own / "link"
    link.symlink_to(site.settings.uploads(site.projects["theirs"]) / upload)
    assert named(site.settings, site.projects["ours"], f"upload:{own}/link/a") is None
    assert upload not in ours.get("/v1/uploads").text


@pytest.mark.parametrize(
    "path",
    ["", ".", "..", "../a", "/a", "a/../b", "a//b", "a/", ".hidden", "a/.b", "a\\b", "a\0", "a\n", "é", "a" * 200],
)
def test_names_that_lead_elsewhere_are_refused(shared_site: Site, path: str) -> None:
    file = {"path": path, "bytes": 0, "sha256": hashlib.sha256().hexdigest()}
    answer = shared_site.client().post("/v1/uploads", json={"name": "u", "files": [file]})
    assert answer.status_code == 400, path


@pytest.mark.parametrize("paths", [("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a/b/c", "a")])
def test_two_files_in_one_place_are_refused(shared_site: Site, paths: tuple[str, str]) -> None:
    files = [{"path": path, "bytes": 0, "sha256": hashlib.sha256().hexdigest()} for path in paths]
    assert shared_site.client().post("/v1/uploads", json={"name": "u", "files": files}).status_code == 400


def test_what_a_run_needs_stays(site: Site, submission: Submission) -> None:
    client = site.member(AccessRole.ADMIN)
    upload = announce(client, a=TRACE)["id"]
    assert send(client, upload, TRACE).json()["state"] == "ready"
    body = submission()
    body["config"]["providers"]["spot"]["trace"] = f"upload:{upload}/a"
    run = client.post("/v1/runs", json=body).json()["id"]
    refused = client.delete(f"/v1/uploads/{upload}")
    assert (refused.status_code, refused.json()["run"]) == (409, run)
    with site.store.writing() as tx:
        tx.execute(runs.update().values(phase=RunPhase.STOPPED.value, ended_us=1))
    assert client.delete(f"/v1/uploads/{upload}").status_code == 204
    assert left(site) == []
    assert client.post("/v1/runs/dry-run", json=body).status_code == 400
    refused = client.post(f"/v1/runs/{run}/resume")
    assert (refused.status_code, refused.json()["detail"]) == (400, f"upload {upload} was deleted meanwhile")
    assert client.get(f"/v1/runs/{run}").json()["phase"] == RunPhase.STOPPED


def test_what_goes_between_a_submission_s_check_and_its_row_is_missed(site: Site, submission: Submission) -> None:
    """Retention removes an upload's row first: its files are still there for the check."""
    client = site.member(AccessRole.ADMIN)
    upload = announce(client, a=TRACE)["id"]
    send(client, upload, TRACE)
    body = submission()
    body["config"]["providers"]["spot"]["trace"] = f"upload:{upload}/a"
    with site.store.writing() as tx:
        uploads.remove(tx, upload)
    refused = client.post("/v1/runs", json=body)
    assert (refused.status_code, refused.json()["detail"]) == (400, f"upload {upload} was deleted meanwhile")
    assert client.get("/v1/runs").json()["data"] == []


def test_what_belongs_to_nothing_is_swept(site: Site) -> None:
    client = site.member(AccessRole.RUNNER)
    kept, waiting, lost = (announce(client, a=content)["id"] for content in (b"a", b"b", b"c"))
    for upload, content in ((kept, b"a"), (lost, b"c")):
        assert send(client, upload, content).json()["state"] == "ready"
    with site.store.writing() as tx:
        uploads.remove(tx, lost)
        known = uploads.all_of(tx)
    storage, project = UploadStorage(site.settings), site.projects["ours"]
    storage.sweep(known)
    assert storage.is_ready(project, lost), "what is fresh may be about to be noted"
    old = os.stat(storage.place(project, lost)).st_mtime - 2 * SETTLED_S
    os.utime(storage.place(project, lost), (old, old))
    storage.sweep(known)
    assert [storage.is_ready(project, one) for one in (kept, waiting, lost)] == [True, False, False]


def test_the_client_goes_on_with_what_is_missing(url: str, site: Site, tmp_path: Path) -> None:
    source = tmp_path / "base"
    (source / "deep").mkdir(parents=True)
    for name, content in (("model.bin", os.urandom(3 << 20)), ("deep/config.json", b"{}"), (".hidden", b"")):
        (source / name).write_bytes(content)
    with Client(url, site.key("ours", AccessRole.RUNNER)) as client:
        (source / "deep" / "config.json").chmod(0)
        made = client.upload(source, "base") if os.geteuid() == 0 else None
        (source / "deep" / "config.json").chmod(0o600)
        again = client.upload(source, "base")
        assert again.state == "ready"
        assert made is None or made.id == again.id
        assert sorted(file.path for file in again.files) == ["deep/config.json", "model.bin"]
        client.fetch_upload(again.id, tmp_path / "copy")
        for file in again.files:
            assert (tmp_path / "copy" / file.path).read_bytes() == (source / file.path).read_bytes()
        client.delete_upload(again.id)
        anew = client.upload(source, "base")
        assert (anew.state, anew.id != again.id) == ("ready", True)
        (source / "bad name").touch()
        with pytest.raises(ValueError, match="bad name"):
            client.upload(source, "base")
