import pytest

from common.plots import make_figure, save_figure


@pytest.mark.draws
def test_picture_is_a_png_file_in_a_new_folder_with_any_settings_of_matplotlib(tmp_path):
    from matplotlib import rc_context  # takes most of a second

    path = tmp_path / "attention" / "a.png"
    with rc_context({"savefig.format": "pdf"}):
        save_figure(make_figure(1, 1), path)
    assert path.read_bytes().startswith(b"\x89PNG")
