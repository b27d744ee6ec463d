import os
from pathlib import Path

import pytest

from torchguard._files import replaced_whole, write_whole


def test_a_file_is_replaced(tmp_path):
    write_whole(tmp_path / "a.txt", "old, and longer")
    assert write_whole(tmp_path / "a.txt", "new").read_text() == "new"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_an_interrupted_write_leaves_what_was_there(tmp_path, monkeypatch):
    file = write_whole(tmp_path / "a.txt", "old")
    write = Path.write_text

    def interrupted(self, text, **options):
        write(self, text[:1], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, "new")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_device_is_written_to():
    assert write_whole(os.devnull, "text") == Path(os.devnull)
    assert not Path(os.devnull).is_file()


def test_files_that_belong_together_are_replaced_together(tmp_path):
    write_whole(tmp_path / "m.onnx", "old")
    write_whole(tmp_path / "m.onnx.data", "old")

    def write(fails):
        with replaced_whole(tmp_path / "m.onnx") as new:
            new.write_text("new")
            new.with_name("m.onnx.data").write_text("new")
            if fails:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(fails=True)
    assert [(tmp_path / name).read_text() for name in ("m.onnx", "m.onnx.data")] == ["old", "old"]
    write(fails=False)
    assert [(tmp_path / name).read_text() for name in ("m.onnx", "m.onnx.data")] == ["new", "new"]
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"]
