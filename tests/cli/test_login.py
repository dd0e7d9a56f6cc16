"""Keys that come by a pipe."""

import os
from io import BytesIO

import pytest

from elastic.cli.login import KEY_BYTES_MAX, is_piped, piped_key


@pytest.mark.parametrize("said", [b"elastic_k", b" elastic_k\r\n", b"elastic_k\nelastic_other\n"])
def test_the_key_is_the_first_line(said: bytes) -> None:
    assert piped_key(BytesIO(said)) == "elastic_k"


def test_a_key_that_is_piped_comes_before_signing_in_and_an_empty_pipe_does_not() -> None:
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb") as pipe:
        with os.fdopen(writes, "wb") as key:
            assert not is_piped(pipe, 0.01)
            key.write(b"elastic_k\n")
            key.flush()
            assert is_piped(pipe)
            assert piped_key(pipe) == "elastic_k"
        assert not is_piped(pipe)
    assert not is_piped(BytesIO(b"elastic_k\n"))


def test_what_is_no_text_is_left_to_the_client_which_refuses_it() -> None:
    assert piped_key(BytesIO(b"\x00\xff\n")) == "\x00\ufffd"


@pytest.mark.parametrize(
    ("said", "words"),
    [(b"", "found no key"), (b" \nelastic_k\n", "found no key"), (b"k" * 10**6, f"more than {KEY_BYTES_MAX} bytes")],
)
def test_what_is_no_key_is_refused(said: bytes, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = BytesIO(said)
    with pytest.raises(SystemExit) as ended:
        piped_key(pipe)
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert words in told
    assert "allowed: a key in its first line, or in ELASTIC_API_KEY" in told
    assert pipe.tell() <= KEY_BYTES_MAX + 1
