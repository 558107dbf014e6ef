import errno

import pytest
from matplotlib import rc_context

from common.plots import make_figure, save_figure


def test_picture_is_a_png_file_in_a_new_folder_with_any_settings_of_matplotlib(tmp_path):
    path = tmp_path / "attention" / "a.png"
    with rc_context({"savefig.format": "pdf"}):
        save_figure(make_figure(1, 1), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_picture_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "loss.png"
    path.write_bytes(b"old")

    class FullDisk:
        def savefig(self, file, format):
            file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        save_figure(FullDisk(), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
