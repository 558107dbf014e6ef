"""Small files."""

import os

import pytest

from common.errors import UserError
from common.files import read_small_file


def test_open_pipes_are_read():
    """A shell passes the output of a command as such a path: prompt_file=<(COMMAND)."""
    reader, writer = os.pipe()
    os.write(writer, "Grüße\r\n".encode())
    os.close(writer)
    assert read_small_file(f"/dev/fd/{reader}", "prompt_file", 100) == "Grüße\r\n"
    os.close(reader)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"12345", "prompt_file is larger than 4 bytes"), (b"ab\xff", r"prompt_file is not UTF-8 \(byte 2\)")],
)
def test_wrong_files_are_refused(tmp_path, content, message):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_small_file(tmp_path / "file", "prompt_file", 4)
