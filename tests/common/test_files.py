"""Small files."""

import pytest

from common.errors import UserError
from common.files import read_small_file


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"12345", "prompt_file is larger than 4 bytes"), (b"ab\xff", r"prompt_file is not UTF-8 \(byte 2\)")],
)
def test_wrong_files_are_refused(tmp_path, content, message):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_small_file(tmp_path / "file", "prompt_file", 4)
