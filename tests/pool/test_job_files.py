"""Files of jobs on nodes of other machines: which may be sent, how they come, and what becomes of those that cannot."""

import asyncio
import contextlib
import hashlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from elastic.compose.job_files import (
    ScriptOutputs,
    engine_here,
    files_of,
    keep,
    lacking,
    local_places,
    trainer_overrides,
)
from elastic.config import Config
from elastic.core.cluster.types import PhaseKind
from elastic.pool import messages as w
from elastic.pool.file_exchange import PART, FileFetcher, FileServer, FilesUnavailable
from elastic.pool.gateway import PoolTokens
from elastic.pool.job_files import SCRIPT_LOG, SubmittedFile, check_path, files_below, named_files, unchanged
from elastic.pool.node_files import NodeFiles
from elastic.pool.pool_files import AT_WORK_MAX, PoolFiles
from elastic.pool.ports import JobEntry
from elastic.protocol import wire
from elastic.protocol.best_checkpoint import returned
from elastic.protocol.frames import WireError
from elastic.system.isolation import IsolatedLoop, LoopFaults
from elastic.worker.trainer.soundness import DIGESTS_KEY, HEADER_FILE, HEADER_KEY, digest_of

MB = 1_000_000
NODE = "train-1"


def written(place: Path, **files: str) -> Path:
    for name, content in files.items():
        path = place / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return place


def test_a_trainer_s_node_is_sent_the_newest_checkpoint_that_is_as_it_was_written(tmp_path: Path) -> None:
    """Both where neither is: the trainer says what is wrong with them."""
    run, names = tmp_path / "run", ("00000001.shards", "00000002.shards", "00000003.shards")
    written(run, **{"config.json": "{}"})
    for name in names:
        place = written(run / "checkpoints" / name, rows=name)
        digests = {"rows": digest_of(place / "rows"), HEADER_KEY: digest_of(b"{}")}
        header = {HEADER_KEY: "{}", DIGESTS_KEY: msgspec.json.encode(digests).decode()}
        (place / HEADER_FILE).write_bytes(msgspec.json.encode(header))

    def sent() -> list[str]:
        found = files_of(JobEntry(job="one", directory=str(run)), PhaseKind.TRAIN)
        return [one.file.path.split("/")[1] for one in found if one.file.path.endswith("rows")]

    newest, older = (run / "checkpoints" / name for name in (names[2], names[1]))
    assert sent() == [names[2]]
    newest.rename(tmp_path / "elsewhere")
    newest.symlink_to(tmp_path / "elsewhere")
    assert sent() == [names[1]], "a link is not followed"
    newest.unlink()
    (tmp_path / "elsewhere").rename(newest)
    (newest / HEADER_FILE).write_bytes(b'{"\xc3')
    assert sent() == [names[1]]
    (older / "rows").write_text("other")
    assert sent() == [names[2], names[1]]
    shutil.rmtree(older)
    older.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=f"{newest}: cannot be read.*; {older}: cannot be read"):
        sent()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_what_a_directory_has_is_told_by_path_and_digest(tmp_path: Path) -> None:
    root = written(tmp_path / "script", train="a", data__rows="b", **{".hidden": "c", "data__.more": "d"})
    (root / "train").chmod(0o755)
    written(
        root, runs__one__lock="", runs__one__secret="of a run", nodes__one__lock="", nodes__one__session="of a node"
    )
    (root / "node.ticket").write_text("of a node")
    found = {one.file.path: one.file for one in named_files(root, (), MB)}
    assert {path: (one.size_bytes, one.executable) for path, one in found.items()} == {
        "train": (1, True),
        "data/rows": (1, False),
    }
    assert found["train"].digest == "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    assert [one.file.path for one in named_files(root, ["data"], MB)] == ["data/rows"]


def test_what_no_node_is_sent_is_refused_with_its_name(tmp_path: Path) -> None:
    root = written(tmp_path / "script", train="a")
    written(tmp_path, secret="b")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "out").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    (root / "node.ticket").write_text("of a node")
    for names, message in (
        (["../secret"], r"found '../secret'; allowed: what is below"),
        ([str(tmp_path / "secret")], "allowed: what is below"),
        (["link"], "link: is a symbolic link"),
        (["out/secret"], "out: is a symbolic link"),
        (["pipe"], "pipe: is no file"),
        (["absent"], r"absent: cannot be read \(No such file"),
        (["node.ticket"], "node.ticket: is a ticket"),
    ):
        with pytest.raises(ValueError, match=message):
            named_files(root, names, MB)
    with pytest.raises(ValueError, match="more than 3 bytes; allowed: that many"):
        files_below(written(tmp_path / "large", one="four"), "large", 3, follow=True)
    many = tmp_path / "many"
    many.mkdir()
    for number in range(w.FILES_MAX + 1):
        (many / str(number)).touch()
    with pytest.raises(ValueError, match=f"more than {w.FILES_MAX} files"):
        files_below(many, "many", MB, follow=True)
    # A policy of Hugging Face's cache is a directory of links to files.
    assert [one.source for one in files_below(root / "link", "policy", MB, follow=True)] == [str(tmp_path / "secret")]
    for path in ("/etc/passwd", "../x", "a/../b", "a//b", "", "a\nb", "\udcff", "語" * 200):
        with pytest.raises(ValueError, match="below the job's directory"):
            check_path(path)


def test_a_file_that_changes_after_the_submission_is_named(tmp_path: Path) -> None:
    files = files_below(written(tmp_path, train="a"), "script", MB, follow=False)
    os.utime(tmp_path / "train", ns=(0, 0))
    assert [one.mtime_ns for one in unchanged(files)] == [0], "it says what it said"
    (tmp_path / "train").write_text("b")
    with pytest.raises(ValueError, match="train: has changed since the job was submitted"):
        unchanged(files)
    (tmp_path / "train").unlink()
    with pytest.raises(ValueError, match="train: cannot be read any more"):
        unchanged(files)


class Programs:
    """What a pool is asked of its jobs' files, where a job's are those below a directory."""

    def __init__(self, files: Sequence[SubmittedFile]) -> None:
        self.submitted = list(files)

    def files_token(self, job: str, placement: int, node: str) -> str:
        return PoolTokens(b"secret").files(job, placement, node)

    def files(self, entry: JobEntry, phase: PhaseKind) -> Sequence[SubmittedFile]:
        return unchanged(self.submitted)

    def lacking(self, entry: JobEntry, placement: int, files: Sequence[w.JobFile]) -> Sequence[tuple[w.JobFile, Path]]:
        return self._outputs(entry).lacking(files) if entry.script else lacking(entry, files)

    def keep(self, entry: JobEntry, placement: int, files: Sequence[w.JobFile]) -> Sequence[str]:
        return self._outputs(entry).keep(files) if entry.script else keep(entry, files)

    def _outputs(self, entry: JobEntry) -> ScriptOutputs:
        where = Path(entry.directory)
        return ScriptOutputs(where / "outputs", where / "logs" / SCRIPT_LOG, entry.outputs)


class Exchange:
    """A pool and a node, without the wire between them."""

    def __init__(self, directory: Path, files: Sequence[SubmittedFile], bytes_max: int = MB) -> None:
        (directory / "node").mkdir()
        (directory / "run").mkdir()
        self.phase = PhaseKind.TRAIN
        self.programs, self.unfit = Programs(files), list[tuple[str, str]]()
        self.entry = JobEntry(job="one", directory=str(directory / "run"))
        self.pool = PoolFiles(self.programs, self, IsolatedLoop("pool", LoopFaults()), 5.0)
        self.node = NodeFiles(directory / "node", bytes_max)
        self.told, self.returning = list[w.OfFiles](), list[bool]()
        self.connect()

    def connect(self, garbled: Callable[[w.OfFiles], w.OfFiles] = lambda message: message) -> None:
        def to_node(message: w.OfFiles) -> None:
            self.told.append(message)
            asyncio.get_running_loop().call_soon(self.node.heard, garbled(message))

        def to_pool(message: w.OfFiles) -> None:
            asyncio.get_running_loop().call_soon(self.pool.heard, NODE, message, to_node)

        self.node.joined(to_pool, 5.0)

    def kept(self, job: str) -> bool:
        """Whether the pool has said that it has what there is of a job."""
        return any(isinstance(message, w.FilesKept) and message.job == job for message in self.told)

    # As the pool's shell.

    def entry_of(self, job: str, placement: int) -> JobEntry | None:
        return self.entry if (job, placement) == ("one", 1) else None

    def phase_of(self, node: str) -> PhaseKind | None:
        return self.phase

    def returns(self, job: str, *, goes_on: bool) -> None:
        self.returning.append(goes_on)

    def job_unfit(self, job: str, placement: int, cause: str) -> None:
        self.unfit.append((job, cause))

    def order(self, **changed: object) -> w.StartResidentFrame:
        token = self.programs.files_token("one", 1, NODE)
        order = w.StartResidentFrame(
            "one", 1, PhaseKind.TRAIN, (), {}, "jobs/one/1/run", "log", files_token=token, returned=("checkpoints",)
        )
        return msgspec.structs.replace(order, **changed)


@contextlib.asynccontextmanager
async def exchange(directory: Path, files: Sequence[SubmittedFile], bytes_max: int = MB) -> AsyncIterator[Exchange]:
    async with asyncio.timeout(60):
        made = Exchange(directory, files, bytes_max)
        try:
            yield made
        finally:
            made.pool.left(NODE)
            await made.node.aclose()


async def test_files_come_whole_and_once_and_what_is_kept_goes_back(tmp_path: Path) -> None:
    content = "x" * (3 * w.CHUNK_BYTES + 1)
    root = written(tmp_path / "policy", weights=content, same=content, config="{}", empty="")
    async with exchange(tmp_path, files_below(root, "model.checkpoint", 9 * MB, follow=True), 9 * MB) as both:
        places = local_places(await both.node.bring(both.order()))
        assert places == {"model.checkpoint": str(tmp_path / "node/jobs/one/1/run/model.checkpoint")}
        assert (tmp_path / "node/jobs/one/1/run/model.checkpoint/weights").read_text() == content
        chunks = sum(isinstance(message, w.FileChunk) for message in both.told)
        assert chunks == 4 + 1, "equal files are fetched once, and empty ones not"
        await both.node.bring(both.order())
        assert sum(isinstance(message, w.FileChunk) for message in both.told) == chunks, "what is there is used"

        place = tmp_path / "node/jobs/one/1/run/checkpoints"
        assert returned(place) == frozenset()
        for version, kept in ((1, "00000001.safetensors"), (2, "00000002.shards"), (3, "00000003.safetensors")):
            path, there, parts = place / kept, tmp_path / "run/checkpoints" / kept, [".metadata", "__0_0.distcp"]
            if version == 2:  # As `torch.distributed.checkpoint` names what it writes.
                draft = place / ".checkpoint-2"
                draft.mkdir()
                for part in parts:
                    (draft / part).write_text(f"{part} of {version}")
                draft.rename(path)
            else:
                written(place, **{kept: f"of {version}"})
            await until(lambda kept=kept: kept in (returned(place) or ()))
            if version == 2:
                assert {one.name: one.read_text() for one in there.iterdir()} == {
                    part: f"{part} of {version}" for part in parts
                }
                sent = files_below(there, f"checkpoints/{kept}", MB, follow=False, hidden=True)
                assert [one.file.path for one in sent] == [f"checkpoints/{kept}/{part}" for part in parts]
            else:
                assert there.read_text() == f"of {version}"
            assert path.exists()
            await until(lambda version=version: both.returning == [True, False] * version)
        (place / "00000001.safetensors").unlink()
        await until(lambda: not (tmp_path / "run/checkpoints/00000001.safetensors").exists())


async def test_a_checkpoint_that_is_written_again_comes_back_with_what_has_not_changed_in_it(tmp_path: Path) -> None:
    async with exchange(tmp_path, ()) as both:
        await both.node.bring(both.order())
        place, there = (tmp_path / one / "checkpoints" for one in ("node/jobs/one/1/run", "run"))
        for content in "bc":
            shutil.rmtree(place / "00000001.shards", ignore_errors=True)
            draft = place / ".checkpoint-1"
            draft.mkdir()
            for name, its in ((".metadata", "a"), ("__0_0.distcp", content)):
                (draft / name).write_text(its)
            draft.rename(place / "00000001.shards")
            await until(lambda c=content: c in [one.read_text() for one in there.glob("00000001.shards/__*")])
        assert (there / "00000001.shards/.metadata").read_text() == "a"


async def test_what_a_script_puts_out_and_the_end_of_its_log_come_back(tmp_path: Path) -> None:
    async with exchange(
        tmp_path, files_below(written(tmp_path / "policy", train="a"), "train", MB, follow=True)
    ) as both:
        both.entry = JobEntry(job="one", directory=str(tmp_path / "run"), script=("train",), outputs=("saved",))
        await both.node.bring(both.order(script=True, returned=("saved",)))
        place, came = tmp_path / "node/jobs/one/1/run", tmp_path / "run/outputs"
        written(place, saved__1__weights="of 1", saved__2="of 2", scratch="x")
        await until(lambda: (came / "saved/1/weights").is_file() and (came / "saved/2").is_file())
        (place / "saved/2").unlink()
        (place / "saved/1/weights").unlink()
        (place / "saved/1").rmdir()
        written(place, saved__1="of 1 again")
        (tmp_path / "node/log").write_text("it ended here")
        both.node.over("one")
        await until(lambda: (tmp_path / "run/logs" / SCRIPT_LOG).is_file())
        assert (tmp_path / "run/logs" / SCRIPT_LOG).read_text() == "it ended here"
        await until(lambda: [path.name for path in came.rglob("*") if path.is_file()] == ["1"])
        assert (came / "saved/1").read_text() == "of 1 again"
        with pytest.raises(ValueError, match="gives back its outputs, and no 'train'"):
            both.programs.lacking(both.entry, 1, [w.JobFile("train", "0" * 64, 1)])


async def test_no_file_of_a_script_keeps_the_others_from_coming_back(tmp_path: Path) -> None:
    """Such as one that no path names, that cannot be read, that is no file, or that is written all the time."""
    async with exchange(tmp_path, ()) as both:
        both.entry = JobEntry(job="one", directory=str(tmp_path / "run"), script=("train",), outputs=("saved",))
        await both.node.bring(both.order(script=True, returned=("saved",)))
        place, came = tmp_path / "node/jobs/one/1/run", tmp_path / "run/outputs"
        written(place, **{"saved__a\nb": "x", "saved__\udcff": "x", "saved__weights": "of 1"})
        (place / "saved/link").symlink_to("/etc/passwd")
        (place / "saved/below").symlink_to("/etc")
        os.mkfifo(place / "saved/pipe")
        grown = 0
        while not (came / "saved/weights").is_file():
            with (place / "saved/metrics").open("a") as metrics:
                metrics.write("1")
            grown += 1
            await asyncio.sleep(0.01)
        assert (came / "saved/weights").read_text() == "of 1"
        both.node.over("one")
        await until(lambda: (came / "saved/metrics").is_file())
        assert (came / "saved/metrics").read_text() == "1" * grown
        assert sorted(path.name for path in came.rglob("*") if path.is_file()) == ["metrics", "weights"]


async def test_a_fetch_goes_on_while_its_node_says_what_else_there_is(tmp_path: Path) -> None:
    async with exchange(tmp_path, ()) as both:
        both.entry = JobEntry(job="one", directory=str(tmp_path / "run"), script=("train",), outputs=("saved",))
        said: list[w.OfFiles] = []
        one, other = (w.JobFile(f"saved/{x}", hashlib.sha256(x.encode()).hexdigest(), 1) for x in "ab")
        say = said.append
        for files in ((one,), (one, other)):  # It says more before it answers.
            both.pool.heard(NODE, w.FilesThere("one", 1, both.order().files_token, files), say)
            await until(lambda: bool(said))
        for content in (b"a", b"b"):
            await until(lambda: bool(said) and isinstance(said[-1], w.AskChunk))
            asked = said.pop()
            assert isinstance(asked, w.AskChunk)
            both.pool.heard(NODE, w.FileChunk(asked.digest, asked.offset, content), say)
        await until(lambda: w.FilesKept("one", 1, (one.digest, other.digest)) in said)
        assert said == [w.FilesKept("one", 1, (one.digest,)), w.FilesKept("one", 1, (one.digest, other.digest))]


async def test_an_output_for_which_there_is_no_room_or_that_cannot_be_had_keeps_no_others_from_coming(
    tmp_path: Path,
) -> None:
    async with exchange(tmp_path, ()) as both:
        both.entry = JobEntry(job="one", directory=str(tmp_path / "run"), script=("train",), outputs=("saved",))
        said: list[w.OfFiles] = []
        sizes = {"changes": 1, "huge": 10**15, "small": 1}
        files = {
            name: w.JobFile(f"saved/{name}", hashlib.sha256(b"x").hexdigest(), size) for name, size in sizes.items()
        }
        files["changes"] = msgspec.structs.replace(files["changes"], digest="0" * 64)
        files["huge"] = msgspec.structs.replace(files["huge"], digest="1" * 64)
        say = said.append
        both.pool.heard(NODE, w.FilesThere("one", 1, both.order().files_token, tuple(files.values())), say)
        for content in (b"y", b"x"):
            await until(lambda: bool(said) and isinstance(said[-1], w.AskChunk))
            asked = said.pop()
            assert isinstance(asked, w.AskChunk)
            both.pool.heard(NODE, w.FileChunk(asked.digest, asked.offset, content), say)
        await until(lambda: bool(said))
        assert said == [w.FilesKept("one", 1, (files["small"].digest,))]
        assert [path.name for path in (tmp_path / "run/outputs").rglob("*") if path.is_file()] == ["small"]


async def test_a_checkpoint_that_cannot_be_had_holds_up_no_training(tmp_path: Path) -> None:
    async with exchange(tmp_path, ()) as both:
        said: list[w.OfFiles] = []
        say, file = said.append, w.JobFile("checkpoints/00000001.safetensors", "0" * 64, 1)
        both.pool.heard(NODE, w.FilesThere("one", 1, both.order().files_token, (file,)), say)
        await until(lambda: bool(said))
        both.pool.heard(NODE, w.FileChunk(file.digest, 0, b"x"), say)
        await until(lambda: both.returning == [True, False])


async def test_a_file_goes_on_from_where_its_connection_was_lost(tmp_path: Path) -> None:
    content = os.urandom(6 * w.CHUNK_BYTES)
    root = tmp_path / "policy"
    root.mkdir()
    (root / "weights").write_bytes(content)
    (one,) = files_below(root, "policy", 9 * MB, follow=True)
    asked: list[int] = []
    fetcher = FileFetcher()
    server = FileServer(lambda chunk: isinstance(chunk, w.FileChunk) and fetcher.heard(chunk))
    server.offer([one])

    def answers(message: object) -> None:
        assert isinstance(message, w.AskChunk)
        asked.append(message.offset // w.CHUNK_BYTES)
        server.asked(message)

    def breaks(message: object) -> None:
        if len(asked) < 2:
            answers(message)

    async with asyncio.timeout(30):
        serving = asyncio.create_task(server.run())
        fetcher.joined(breaks, 5.0)
        fetching = asyncio.create_task(fetcher.fetch(one.file, tmp_path / "fetched"))
        part = tmp_path / f"fetched{PART}"
        await until(lambda: part.exists() and part.stat().st_size == 2 * w.CHUNK_BYTES)
        fetcher.left()
        fetching.cancel()  # As if the process had died.
        await asyncio.gather(fetching, return_exceptions=True)
        again = asyncio.create_task(fetcher.fetch(one.file, tmp_path / "fetched"))
        fetcher.joined(answers, 5.0)
        await again
        serving.cancel()
    assert asked == [0, 1, 2, 3, 4, 5]
    assert (tmp_path / "fetched").read_bytes() == content
    assert not part.exists()


async def test_nothing_is_fetched_onto_what_of_the_disk_is_to_stay_free(tmp_path: Path) -> None:
    """Also where others have filled it since there was room."""
    fetcher, file = FileFetcher(10**18), w.JobFile("weights", "0" * 64, 1)
    fetcher.joined(lambda asked: fetcher.heard(w.FileChunk(asked.digest, asked.offset, b"x")), 5.0)
    with pytest.raises(OSError, match=f"{10**18} bytes stay free"):
        await fetcher.fetch(file, tmp_path / "weights")


async def test_other_content_than_was_told_is_not_used(tmp_path: Path) -> None:
    root = written(tmp_path / "policy", weights="sound")
    async with exchange(tmp_path, files_below(root, "model.checkpoint", MB, follow=True)) as both:

        def garbled(message: w.OfFiles) -> w.OfFiles:
            return msgspec.structs.replace(message, data=b"wrong") if isinstance(message, w.FileChunk) else message

        both.connect(garbled)
        with pytest.raises(FilesUnavailable, match=r"model\.checkpoint/weights: its content has not the digest"):
            await both.node.bring(both.order())
        both.connect()
        await both.node.bring(both.order())
        blob = next((tmp_path / "node/files").iterdir())
        blob.chmod(0o600)
        blob.write_text("bad!!")
        await both.node.bring(both.order())
        assert blob.read_text() == "sound", "what was damaged on the node is fetched again"


async def test_of_a_file_that_is_written_after_it_was_told_of_nothing_is_sent(tmp_path: Path) -> None:
    root = written(tmp_path / "policy", weights="submitted")
    async with exchange(tmp_path, files_below(root, "model.checkpoint", MB, follow=True)) as both:
        await both.node.bring(both.order())
        (file,) = both.programs.submitted
        (root / "weights").write_text("of another")
        answers: list[w.OfFiles] = []
        server = FileServer(answers.append)
        server.offer([file])
        server.asked(w.AskChunk(file.file.digest, 0))
        serving = asyncio.create_task(server.run())
        await until(lambda: bool(answers))
        serving.cancel()
        assert answers == [w.FileChunk(file.file.digest, 0, cause="it has changed")]


@pytest.mark.parametrize(("script", "size"), [(False, 600_000), (True, 450_000)])
async def test_files_of_a_node_take_no_more_than_is_allowed_under_any_of_their_names(
    tmp_path: Path, script: bool, size: int
) -> None:
    roots = [written(tmp_path / name, **{name * 255: name * size}) for name in "ab"]
    async with exchange(tmp_path, files_below(roots[0], "policy", MB, follow=True)) as both:
        await both.node.bring(both.order(script=script, returned=()))
        both.node.over("one")
        await until(lambda: not script or both.kept("one"))
        both.programs.submitted[:] = files_below(roots[1], "policy", MB, follow=True)
        both.entry_of = lambda job, placement: both.entry
        token = both.programs.files_token("two", 1, NODE)
        await both.node.bring(both.order(job="two", directory="jobs/two/1/run", files_token=token, script=script))
        held = {
            its.st_ino: its.st_size
            for path in (tmp_path / "node").rglob("*")
            if (its := path.stat()) and path.is_file()
        }
        assert sum(held.values()) <= MB
        both.node.over("two")
        await until(lambda: both.kept("two"))
        both.programs.submitted[:] = files_below(written(tmp_path / "c", c="c" * 2 * MB), "policy", 9 * MB, follow=True)
        token = both.programs.files_token("three", 1, NODE)
        with pytest.raises(FilesUnavailable, match=f"and the node's residents have 0 already; allowed there: {MB}"):
            await both.node.bring(both.order(job="three", directory="jobs/three/1/run", files_token=token))
        assert (tmp_path / "node/jobs/two/1/run/policy" / ("b" * 255)).is_file(), "nothing goes for what cannot come"


def test_what_a_training_node_says_it_keeps_is_within_a_checkpoint_and_the_disk(tmp_path: Path) -> None:
    entry = JobEntry(job="one", directory=str(tmp_path))
    one = w.JobFile("checkpoints/00000001.safetensors", "0" * 64, 1)
    for files, message in (
        (
            [
                msgspec.structs.replace(
                    one, path="checkpoints/\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661.safetensors"
                )
            ],
            "and no",
        ),
        ([msgspec.structs.replace(one, path=f"checkpoints/00000001.shards/{'a' * 4000}")], "and no"),
        ([one, msgspec.structs.replace(one, digest="1" * 64)], "one file of a path"),
        ([msgspec.structs.replace(one, size_bytes=1 << 52)], f"take {1 << 52} bytes, and the disk of .* has room for"),
    ):
        with pytest.raises(ValueError, match=message):
            lacking(entry, files)
    for digest in ("0" * 64, "1" * 64):  # Who says something else each time fills no disk with parts.
        ((_, place),) = lacking(entry, [msgspec.structs.replace(one, digest=digest)])
        place.with_name(f"{place.name}{PART}").touch()
    assert [path.name for path in place.parent.iterdir()] == [f"{'1' * 64}{PART}"]


async def test_what_a_node_may_not_ask_for_it_does_not_get(tmp_path: Path) -> None:
    root = written(tmp_path / "policy", weights="a")
    async with exchange(tmp_path, files_below(root, "model.checkpoint", MB, follow=True)) as both:
        for order in (both.order(files_token="guessed"), both.order(placement=2)):
            with pytest.raises(FilesUnavailable, match="no such start of this job any more"):
                await both.node.bring(order)
        assert not both.unfit
        fetcher = FileFetcher()

        def say(message: object) -> None:
            assert isinstance(message, w.AskChunk)
            both.pool.heard("other-1", message, lambda said: isinstance(said, w.FileChunk) and fetcher.heard(said))

        fetcher.joined(say, 5.0)
        with pytest.raises(FilesUnavailable, match="was not offered"):
            await fetcher.fetch(both.programs.submitted[0].file, tmp_path / "stolen")
        for path in ("checkpoints/best.json", "config.json", "checkpoints/../../x", "checkpoints/00000001.state"):
            with pytest.raises(ValueError, match="a trainer keeps checkpoints"):
                lacking(both.entry, [w.JobFile(path, "0" * 64, 1)])
        both.pool.left("other-1")
        both.phase, tell = PhaseKind.ROLLOUT, both.told.append  # On whose nodes there are no trainers.
        forged = (w.JobFile("checkpoints/00000009.safetensors", "0" * 64, 1),)
        both.pool.heard(NODE, w.FilesThere("one", 1, both.order().files_token, forged), tell)
        both.pool.heard(NODE, w.AskFiles("one", 1, both.order().files_token), tell)
        await until(lambda: isinstance(both.told[-1], w.FilesNeeded) and not both.told[-1].cause)
        assert not any(isinstance(message, w.AskChunk) for message in both.told)
        for _ in range(AT_WORK_MAX):
            both.pool.heard("other-1", w.AskFiles("one", 1, "guessed"), both.told.append)
        with pytest.raises(WireError, match=f"asks for more than {AT_WORK_MAX}"):
            both.pool.heard("other-1", w.AskFiles("one", 1, "guessed"), both.told.append)
        both.pool.left("other-1")


async def test_a_job_whose_file_has_changed_fails_with_its_name(tmp_path: Path) -> None:
    root = written(tmp_path / "policy", weights="a")
    async with exchange(tmp_path, files_below(root, "model.checkpoint", MB, follow=True)) as both:
        written(root, weights="b")
        with pytest.raises(FilesUnavailable, match="weights: has changed since the job was submitted"):
            await both.node.bring(both.order())
        assert both.unfit == [("one", f"{root / 'weights'}: has changed since the job was submitted")]


async def test_the_oldest_files_make_room_and_a_node_without_room_says_so(tmp_path: Path) -> None:
    root = tmp_path / "policy"
    async with exchange(tmp_path, (), 2500) as both:
        for number in (1, 2, 3):
            both.programs.submitted = files_below(written(root, weights=str(number) * 1000), "policy", MB, follow=True)
            await both.node.bring(both.order(returned=()))
            both.node.over("one")
        held = {path.read_text()[0] for path in (tmp_path / "node/files").iterdir()}
        assert held == {"2", "3"}, "what was used last the longest ago has made room"
        both.programs.submitted = files_below(written(root, weights="4" * 3000), "policy", MB, follow=True)
        with pytest.raises(FilesUnavailable, match=r"its files take 3000 bytes.*allowed there: 2500 together"):
            await both.node.bring(both.order())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", place], check=False, capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("needs root, to have a small file system")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


async def test_a_disk_that_is_full_ends_a_start_with_one_message(tmp_path: Path, small_disk: Path) -> None:
    root = written(tmp_path / "policy", weights="x" * 100_000)
    async with exchange(small_disk, files_below(root, "model.checkpoint", MB, follow=True)) as both:
        with pytest.raises(FilesUnavailable, match=r"its files take 100000 bytes, and the disk of .* has room for"):
            await both.node.bring(both.order())


def test_a_trainer_finds_what_was_sent_to_its_machine(tmp_path: Path) -> None:
    written(tmp_path, **{"model.checkpoint__config.json": "{}", "trainer.loss__mine.py": ""})
    config = Config.model_validate({"model": {"checkpoint": "/at/home"}, "trainer": {"loss": "/at/home/mine.py:loss"}})
    assert trainer_overrides(config, local_places({w.FILES_VARIABLE: str(tmp_path)})) == [
        f"model.checkpoint={tmp_path}/model.checkpoint",
        f"trainer.loss={tmp_path}/trainer.loss/mine.py:loss",
    ]
    assert local_places({}) == {}


def test_an_engine_has_the_base_that_was_sent_to_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine.vllm.base").mkdir()
    monkeypatch.setenv(w.FILES_VARIABLE, str(tmp_path))
    config = {"kind": "vllm", "max_context_tokens": 64, "vllm": {"base": "/at/home"}}
    welcome = wire.Welcome(
        session_key="",
        epoch=0,
        heartbeat_interval_s=1.0,
        flush_interval_s=1.0,
        silence_timeout_s=1.0,
        engine=config,
        model={},
        relay="",
        resume_timeout_s=1.0,
        orchestrator_timeout_s=1.0,
        pull_timeout_s=1.0,
        load_timeout_s=1.0,
        drain_timeout_s=1.0,
    )
    with pytest.raises(ValueError, match=f"engine.vllm.base: {tmp_path}/engine.vllm.base has no config.json"):
        engine_here(welcome)
